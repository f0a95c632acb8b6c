"""The allocations of DeepSpeed's stage 3 around forward and backward, in the order of its code, with their streams.

Sources, in deepspeed/runtime/zero: stage3.py (_create_fp16_partitions_with_defragmentation, _create_fp32_partitions,
initialize_optimizer_states, _setup_for_real_optimizer, step, _post_step), utils.py (defragment),
partition_parameters.py. The scripts begin where `defragment` has moved all shards to the CPU and emptied the cache.
Earlier blocks, including whole weights of a model made without `zero.Init`, have left nothing behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.dtypes import fp16, fp32, fp64
from memcalc.engines.base.script import Event, Script, Scripts
from memcalc.engines.deepspeed.sub_groups import SubGroup, persistent, sub_groups_of
from memcalc.engines.deepspeed.zero_layout import frozen, groups_of, sent_dtype, sizes_of
from memcalc.engines.deepspeed.zero_optimizer import states_come, steps

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

GATHERS: Final = "all-gather"
REDUCES: Final = "reduce and partition"
STREAMS: Final = {
    "gathered parameters": GATHERS,
    "all-gather buffer of several parameters": GATHERS,
    "gradient in the dtype that is sent": REDUCES,
    "padding of the bucket": REDUCES,
    "copy of the bucket that is reduced": REDUCES,
    "reduced gradients in their own dtype": REDUCES,
    "gradients of experts, averaged over dp": REDUCES,
}
"""The stream of a block that is not on the default one, by its name in the run (`overlap_comm`, which is on in stage
3)."""


def scripts_of_stage_3(model: Model, setup: Setup, backward: list[Event]) -> Scripts:
    """Return the scripts of stage 3. `backward` are the events when a backward begins."""
    kept = [n for sizes in persistent(model, setup).values() for n in sizes] if setup.shards > 1 else []
    groups = sub_groups_of(model, setup)
    made = _made(model, setup, groups)
    closing = Script()
    if setup.compute_dtype is fp16:
        closing.passes("whether a gradient overflowed", 1, REDUCES)
    step, first = (_step(setup, groups, kept, first=first) for first in (False, True))
    return Scripts(made, made, backward, closing.events, step, first)


def _made(model: Model, setup: Setup, groups: list[SubGroup]) -> list[Event]:
    script, dtype = Script(), setup.compute_dtype
    for i in sorted(frozen(model)):
        script.comes(("shard", i), -(-sizes_of(model)[i] // setup.shards) * dtype.itemsize)
    own = sum(sum(group.parts) for group in groups)
    script.comes("shards", own * dtype.itemsize)
    for g, group in enumerate(groups):
        if dtype is not fp32:
            script.comes("converted", sum(group.parts) * fp32.itemsize)
        script.comes(("master", g), sum(group.parts) * fp32.itemsize)
        script.goes(*(["converted"] if dtype is not fp32 else []))
    script.passes("zeros", max(sum(group.parts) for group in groups) * fp32.itemsize)
    assert setup.reduce_bucket_size is not None
    script.comes("reduce bucket", setup.reduce_bucket_size * sent_dtype(setup).itemsize)
    script.comes("gradients", own * dtype.itemsize)
    for n in _padded(model, setup):  # all are gathered once, one by one
        script.passes("gathered", n * dtype.itemsize)
    return script.events


def _padded(model: Model, setup: Setup) -> list[int]:
    """Return the elements of each weight as it is gathered, in definition order."""
    sizes = sizes_of(model)
    ranks = {i: group.ranks for group in groups_of(model, setup.shards) for i in group.places}
    return [-(-sizes[i] // n) * n for i, n in sorted(ranks.items())]


def _step(setup: Setup, groups: list[SubGroup], kept: list[int], *, first: bool) -> list[Event]:
    """Return the events of the step: norms shard by shard in fp64, the update of each sub-group, and small weights made
    whole again."""
    script, dtype = Script(), setup.compute_dtype
    if not first:
        script.goes(*(("kept whole", k) for k in range(len(kept))))
    for g, group in enumerate(groups):
        for k, n in enumerate(group.parts):
            script.comes("in fp64", n * fp64.itemsize)
            script.comes(("norm", k), fp64.itemsize)
            script.goes("in fp64")
        script.comes(("norm of a group", g), fp64.itemsize)
        script.goes(*(("norm", k) for k in range(len(group.parts))))
    for g, group in enumerate(groups):
        _update(script, setup, g, sum(group.parts), joined=len(group.parts) > 1, first=first)
    for k, n in enumerate(kept):
        script.comes(("kept whole", k), n * dtype.itemsize)
    script.goes(*(("norm of a group", g) for g in range(len(groups))))
    return script.events


def _update(script: Script, setup: Setup, g: int, elements: int, *, joined: bool, first: bool) -> None:
    """Update a sub-group. A single shard is not joined (flatten)."""
    dtype = setup.compute_dtype
    casts = dtype is not fp32
    if joined:
        script.comes("joined", elements * dtype.itemsize)
    if casts:
        script.comes("in fp32", elements * fp32.itemsize)
        script.goes(*(["joined"] if joined else []))
    if first:
        states_come(script, setup, g, elements)
    steps(script, setup, elements)
    script.goes(*(["in fp32"] if casts else ["joined"] if joined else []))
