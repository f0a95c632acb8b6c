"""The rows of a rank with parts of ZeRO++: ZeRO-3's, and the second partition of the weights while it exists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.engines.deepspeed.zero_layout import frozen, sizes_of
from memcalc.engines.deepspeed.zero_partitions import block
from memcalc.engines.deepspeed.zero_plus_plus import SECOND_PARTITION, Nodes, PlusPlus

if TYPE_CHECKING:
    from memcalc.core.rows import Row
    from memcalc.engines.base.holdings import Holdings
    from memcalc.engines.deepspeed.zero3_step import ZeRO3
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

SOURCE = "deepspeed/runtime/zero/partition_parameters.py"


def holdings(model: Model, setup: Setup, held: Holdings, over: ZeRO3) -> Holdings:
    """Return what a rank holds; `held` is what ZeRO-3 holds, and `over` what it does while a micro-batch runs.

    A second partition comes when a parameter is released for the first time in a step, and goes when the step is over. Frozen
    parameters keep theirs, as they do not change (stage3.py, invalidate_secondary_tensor).
    """
    idle = frozen(model)
    nodes = nodes_of(setup)
    weights = list(model.weights())
    first = PlusPlus(
        over._replace(ranks=setup.shards),
        bool(setup.zero_quantized_weights),
        setup.zero_hpz_partition_size,
        nodes,
        tuple(tuple(shape) for _, shape, _ in weights) if nodes else (),
    )
    later = first._replace(is_later=True)
    always = _second(model, setup, idle, "always")
    step = _second(model, setup, frozenset(range(len(weights))) - idle, "from the first release to the end of the step")
    return held._replace(
        always=(*held.always, *always),
        step=(*held.step, *step),
        over=later if setup.micro_batches > 1 else first,
        over_first=first,
        order=None,
    )


def nodes_of(setup: Setup) -> Nodes | None:
    """Return the nodes that qgZ's two hops go over; None if gradients are reduce-scattered, as DeepSpeed does on one node."""
    count = setup.gpus // setup.gpus_per_node
    return Nodes(count, setup.gpus_per_node) if setup.zero_quantized_gradients and count > 1 else None


def _second(model: Model, setup: Setup, places: frozenset[int], life: str) -> list[Row]:
    """Return the row of the second partitions of these parameters, padded for all ranks."""
    second, ranks, sizes = setup.zero_hpz_partition_size, setup.shards, sizes_of(model)
    elements = sum(-(-sizes[i] // ranks) * ranks // second for i in places) if second > 1 else 0
    row = block("buffers", SECOND_PARTITION, "parameters/hpz", elements, setup.compute_dtype, life, SOURCE)
    return [row] if elements else []
