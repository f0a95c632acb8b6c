"""torch.nn.DataParallel (torch/nn/parallel/data_parallel.py), on the first GPU, which has most.

`--micro-batch-size` is the sequences of each GPU: the caller gives GPUs times as many, all on the first GPU. Every forward
scatters them, broadcasts all parameters and buffers, runs the replicas, and gathers all tensors of their outputs on the
first GPU: losses and logits. Backward sums the replicas' gradients there, where the only optimizer updates the only model.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import Dim, numel
from memcalc.engines import none as plain
from memcalc.engines.base.holdings import OF_CALLER, Holdings
from memcalc.engines.data_parallel.step import BUFFER, Replicas, broadcast_chunks, reduce_chunks
from memcalc.layout.collectives import Collective, Kind

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.core.rows import Row
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_SOURCE: Final = "torch/nn/parallel/comm.py"
_LONG: Final = 8
"""The bytes of a token's number."""


def holdings(model: Model, setup: Setup) -> Holdings:
    held = plain.holdings(model, setup)
    assert held.order is not None
    order = held.order._replace(before=tuple(_of_all(setup, row) for row in held.order.before))
    always = tuple(_of_all(setup, row) for row in held.always)
    return held._replace(always=always, order=order, hooks=Replicas(setup.gpus))


def _of_all(setup: Setup, row: Row) -> Row:
    """Return the row of the batch for all replicas' sequences; another row as it is."""
    if row.life != OF_CALLER[0]:
        return row
    return row._replace(shape=(Dim("GPUs", setup.gpus), *row.shape))


def collectives(model: Model, setup: Setup) -> list[Collective]:
    """Return what the first GPU sends and receives in a step."""
    dtype, sizes = setup.compute_dtype, [numel(weight.shape)[0] for weight in model.program.weights()]
    total = sum(sizes) * dtype.itemsize
    others = setup.gpus - 1
    tokens = setup.micro_batch_size * (setup.seq_len or 0)
    logits = gathered_logits_of(model, setup) // setup.gpus * others
    losses = others * 4
    sums = len(reduce_chunks(sizes, dtype.itemsize))
    return [
        _one(
            setup, "send", "tokens and labels, scattered", "forward", "int64", 2 * others, 2 * others * tokens * _LONG
        ),
        _one(
            setup, "broadcast", "parameters", "forward", dtype.name, len(broadcast_chunks(sizes, dtype.itemsize)), total
        ),
        *_buffers(model, setup),
        _one(setup, "send", "logits and losses, gathered", "forward", dtype.name, 2 * others, logits + losses),
        _one(setup, "send", "gradients of the losses, scattered", "backward", "fp32", others, losses),
        _one(setup, "reduce", "gradients", "backward", dtype.name, sums, total),
    ]


def gathered_logits_of(model: Model, setup: Setup) -> int:
    """Return the bytes of all replicas' logits, which the first GPU gathers."""
    program: Any = model.program
    tokens = setup.gpus * setup.micro_batch_size * (setup.seq_len or 0)
    return tokens * program.vocab.size * setup.compute_dtype.itemsize


def _buffers(model: Model, setup: Setup) -> list[Collective]:
    held: Counter[DType] = Counter()
    for buffer in model.program.buffers():
        if buffer.registered:
            held[buffer.dtype or setup.compute_dtype] += numel(buffer.shape)[0]
    return [
        _one(
            setup,
            "broadcast",
            "module buffers",
            "forward",
            dtype.name,
            -(-n * dtype.itemsize // BUFFER),
            n * dtype.itemsize,
        )
        for dtype, n in held.items()
    ]


def _one(setup: Setup, kind: Kind, name: str, phase: str, dtype: str, calls: int, payload: int) -> Collective:
    formula = f"{payload} B = {payload} B"
    return Collective("dp", kind, name, phase, dtype, setup.gpus, calls, payload, formula, source=_SOURCE)


def textbook(model: Model, setup: Setup) -> list[Collective]:
    return []
