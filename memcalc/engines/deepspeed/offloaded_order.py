"""The allocations of ZeRO-1 and ZeRO-2 on the GPU when the optimizer is on the host, in the order of their code
(stage_1_and_2.py: __init__, reduce_ipg_grads, copy_grads_in_partition, step)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from memcalc.core.dtypes import fp32, fp64
from memcalc.engines.base.holdings import Order
from memcalc.engines.base.script import Event, Script, Scripts
from memcalc.engines.deepspeed.order import (
    BUCKET,
    NUMBER,
    can_be_played,
    copies_of_a_call,
    scaled_loss,
    weights_are_flattened,
    weights_are_moved,
)
from memcalc.engines.deepspeed.zero1_reduction import buckets_in_order
from memcalc.engines.deepspeed.zero_layout import (
    Slices,
    flat,
    groups_of,
    largest_trained,
    ready_order,
    sent_dtype,
    sizes_of,
    slices_of,
)

if TYPE_CHECKING:
    from memcalc.core.rows import Row
    from memcalc.engines.deepspeed.zero_layout import Owned
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_IN_FP64: Final = "in fp64"


def order_of(model: Model, setup: Setup, before: list[Row], owned: Owned) -> Order | None:
    """Return the order of a rank with these partitions; None if it is not known.

    ZeRO-2 computes norms with the last micro-batch alone, so the micro-batches of a step differ there.
    """
    if not can_be_played(model, setup) or (setup.zero == 2 and setup.micro_batches > 1):
        return None
    return Order(tuple(before), (), (), (), scripts=partial(_scripts, model, setup, owned))


def _scripts(model: Model, setup: Setup, owned: Owned) -> Scripts:
    slices = slices_of(model, setup, owned)
    step = _step(slices)
    reduces = setup.zero == 1
    return Scripts(
        _made(model, setup, owned, roomy=True),
        _made(model, setup, owned, roomy=False),
        scaled_loss(model, setup, 2),
        _reduced(model, setup, slices) if reduces else _norms(slices),
        step,
        step,
        frozenset([BUCKET]) if reduces else frozenset(),
        tuple(("gradient", i) for i in ready_order(model)) if reduces else (),
    )


def _made(model: Model, setup: Setup, owned: Owned, *, roomy: bool) -> list[Event]:
    """Return the events of __init__. `roomy`: the flat buffer is made beside the weights; else of copies on the CPU."""
    script, itemsize = Script(), setup.compute_dtype.itemsize
    weights_are_moved(script, model, setup.compute_dtype)
    for g, (group, part) in enumerate(zip(groups_of(model, setup.shards), owned, strict=True)):
        weights_are_flattened(script, g, group, setup.compute_dtype.itemsize, roomy=roomy)
        script.passes("partition, cloned", part.size * itemsize)
    script.comes("block for a gradient from the host", largest_trained(model, setup.shards) * itemsize)
    return script.events


def _reduced(model: Model, setup: Setup, slices: Slices) -> list[Event]:
    """Return the events of reduce_gradients in stage 1, bucket by bucket."""
    script, most, sizes = Script(), setup.reduce_bucket_size, sizes_of(model)
    assert most is not None
    layout, left = flat(model, setup.shards), list[int]()
    for bucket in buckets_in_order(model, layout, most):
        for i in bucket:
            if sizes[i] > most:
                script.comes(("copied", i), sizes[i] * setup.compute_dtype.itemsize)
            script.goes(("gradient", i))
        places = [layout.order[i] for i in bucket]
        for call in layout.all_reduces(places, most):
            copies_of_a_call(script, call.slices, setup.compute_dtype, sent_dtype(setup))
        for i, place in zip(bucket, places, strict=True):
            if place in slices:
                _leaves(script, setup, place, slices[place])
            if sizes[i] > most and place in slices:
                script.goes(("copied", i))
            elif sizes[i] > most:
                left.append(i)
    script.goes(BUCKET, *(("copied", i) for i in left))
    return script.events


def _leaves(script: Script, setup: Setup, place: int, elements: int) -> None:
    """Compute the norm of a gradient, then copy it to the host in fp32."""
    script.comes(_IN_FP64, elements * fp64.itemsize)
    script.comes(("norm", place), fp64.itemsize)
    script.goes(_IN_FP64)
    if setup.compute_dtype is not fp32:
        script.passes("in fp32", elements * fp32.itemsize)


def _norms(slices: Slices) -> list[Event]:
    """Return the norms that backward has left in stage 2. The run frees its own when it ends, as blocks of a run have no
    names of their own."""
    return [Event(("norm", place), fp64.itemsize) for place in slices]


def _step(slices: Slices) -> list[Event]:
    script = Script()
    script.passes("the norm that is sent", NUMBER)
    script.goes(*(("norm", place) for place in slices))
    return script.events
