"""The order in which a Megatron rank allocates what it holds.

Weights are made one by one. With the distributed optimizer the weights of each buffer are then moved into one flat
block, and their first blocks stay behind, free (core/distributed/param_and_grad_buffer.py). Main gradients are one flat
block per buffer. Main weights are fp32 copies of each weight, or of the part of it in the rank's shard of its buffer
(core/optimizer/distrib_optimizer.py, _build_model_and_main_param_groups). The last layers come first, which is the
order of a buffer. The order is that of the first of the ranks that share a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import DType, fp32
from memcalc.core.rows import Component, Row
from memcalc.engines.base.holdings import Holdings, Order, state_rows
from memcalc.engines.megatron.engine import Buffer, Stage, buffers_of
from memcalc.engines.megatron.layer_wise import shards_buffers
from memcalc.engines.megatron.trained_part import parameter_rows
from memcalc.optimizers import Parameter
from memcalc.setup.setup import DTYPES, Setup

_BUFFER: Final = "megatron/core/distributed/param_and_grad_buffer.py"
_OPTIMIZER: Final = "megatron/core/optimizer/distrib_optimizer.py"


def order_of(setup: Setup, stage: Stage, held: Holdings) -> Order:
    """Return the order of everything that `held` always has."""
    buffers = buffers_of(setup, stage)
    made, frozen = parameter_rows(setup, stage)
    gradients = [_flat("gradients", buffer, DTYPES[setup.grad_dtype]) for buffer in buffers]
    rest = [row for row in (*held.always, *held.backward) if row.component == "buffers"]
    casts = tuple(row for row in held.step if row.component == "gradients")
    if not shards_buffers(setup):
        mains = [row for row in held.always if row.component == "optimizer_states" and _is_main(row)]
        states = [row for row in held.always if row.component == "optimizer_states" and not _is_main(row)]
        return Order((*made, *frozen, *gradients, *mains, *rest), tuple(states), casts, ())
    flat = [_flat("parameters", buffer, buffer.dtype) for buffer in buffers]
    parts = [part for buffer in buffers for part in _parts(stage, buffer)]
    mains = [
        Row("optimizer_states", "main weight", part.shape, fp32, source=_OPTIMIZER)
        for part in parts
        if setup.has_master_weights
    ]
    states = [row for row in state_rows(setup, parts, fp32) if row.shape]
    return Order((*frozen, *mains, *rest), tuple(states), casts, (), moved=tuple(made), flat=(*flat, *gradients))


def _is_main(row: Row) -> bool:
    return row.name.endswith("fp32 main weight")


def _flat(component: Component, buffer: Buffer, dtype: DType) -> Row:
    return Row(component, f"flat {buffer.name}", (Dim("weights", buffer.elements),), dtype, source=_BUFFER)


def _parts(stage: Stage, buffer: Buffer) -> list[Parameter]:
    """Return what the first rank updates of each weight. The padding of its shard counts as part of the last one."""
    names = {weight.name for weight in buffer.weights}
    sizes = [
        numel(w.shape)[0]
        for chunk in stage.chunks
        for w in chunk.weights()
        if w.name in names and chunk.wants_gradient(w)
    ]
    shard = buffer.padded // buffer.ranks
    return [Parameter("part of a weight", (Dim("part", part),), 1, False) for part in _first(sizes, shard)]


def _first(sizes: Sequence[int], elements: int) -> list[int]:
    """Return parts of these sizes, the last first, that add up to `elements`."""
    out: list[int] = []
    for size in reversed(sizes):
        part = min(size, elements - sum(out))
        if part:
            out.append(part)
    out[-1] += elements - sum(out)
    return out
