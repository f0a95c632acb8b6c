"""The allocations of DeepSpeed's stages 0 to 2 around forward and backward, in the order of their code.

Sources: deepspeed/runtime/zero/stage_1_and_2.py (__init__, reduce_gradients, independent_gradient_partition_epilogue,
step), fp16/fused_optimizer.py (stage 0), engine.py. Everything is on one stream: `overlap_comm` is off. The caller
makes the model on the CPU, where it is cast; then each weight is moved separately.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc.core.dtypes import DType, fp32, fp64
from memcalc.engines.base.holdings import Order
from memcalc.engines.base.script import Event, Script, Scripts
from memcalc.engines.deepspeed.zero3_order import STREAMS, scripts_of_stage_3
from memcalc.engines.deepspeed.zero_layout import (
    ALL_REDUCE_BUCKET,
    Group,
    Owned,
    Partition,
    buckets_before_exceeding,
    flat,
    groups_of,
    partitions,
    ready_order,
    reduced_in_order,
    sent_dtype,
    sizes_of,
    unreached,
    whole_of,
)
from memcalc.engines.deepspeed.zero_optimizer import has_fused_adam, states_come, steps
from memcalc.engines.deepspeed.zero_ranks import kinds_of
from memcalc.kernels import loss_in

if TYPE_CHECKING:
    from memcalc.core.rows import Row
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import HooksOf
    from memcalc.tape.rewritten import OverRun

NUMBER = 4
"""The bytes of a scalar."""
BUCKET = "reduce bucket"
OWNED = "gradients of the partition, and of what straddles it"
"""The names of blocks in a run (zero2_step.py)."""


def order_of(
    model: Model,
    setup: Setup,
    before: list[Row],
    own: Owned = (),
    first: HooksOf | None = None,
    untraced: OverRun | None = None,
) -> Order | None:
    """Return the order of a rank with these partitions; None if it is not known.

    `before` are the rows besides weights and states; `first` and `untraced` as in Order.
    """
    if not can_be_played(model, setup):
        return None
    if setup.zero == 3:
        scripts = partial(scripts_of_stage_3, model, setup, scaled_loss(model, setup, 2))
    elif setup.zero:
        scripts = partial(scripts_of_stages_1_2, model, setup, own)
    else:
        scripts = partial(scripts_of_stage_0, model, setup)
    streams = STREAMS if setup.zero == 3 else {}
    return Order(tuple(before), (), (), (), streams, first=first, untraced=untraced, scripts=scripts)


def can_be_played(model: Model, setup: Setup) -> bool:
    """Tell whether the scripts of this module hold for a setup: all weights get a gradient, and transformers has made
    the model.

    Stage 0 with another optimizer than FusedAdam is FP16_UnfusedOptimizer, which has no script here.
    """
    if setup.tp > 1 or setup.pp > 1 or model.program.source or unreached(model):
        return False
    return setup.zero > 0 or (setup.cp == 1 and setup.ep == 1 and has_fused_adam(setup))


def scripts_of_stage_0(model: Model, setup: Setup) -> Scripts:
    step = _step_0 if setup.has_master_weights else _plain_step_0
    made = _made_0(model, setup)
    return Scripts(
        made,
        made,
        scaled_loss(model, setup, 1),
        _closing_0(model, setup),
        step(model, setup, first=False),
        step(model, setup, first=not setup.has_master_weights),
        gradients=tuple(("gradient", i) for i in ready_order(model)),
    )


def scripts_of_stages_1_2(model: Model, setup: Setup, own: Owned) -> Scripts:
    ranks = setup.shards
    rank = partitions(model, ranks).index(own)
    layout = _Layout(model, setup, own, rank)
    return Scripts(
        layout.before_first_step(roomy=True),
        layout.before_first_step(roomy=False),
        scaled_loss(model, setup, 2),
        layout.closing_1() if setup.zero == 1 else layout.closing_2(),
        layout.step(first=False),
        layout.step(first=True),
        frozenset([BUCKET]) if setup.zero == 1 else frozenset([OWNED]),
        tuple(("gradient", i) for i in ready_order(model)) if setup.zero == 1 else (),
    )


def scaled_loss(model: Model, setup: Setup, count: int) -> list[Event]:
    """Return the allocations of the loss over the accumulation steps, and of that times the loss scale (engine.py,
    backward; base_optimizer.py)."""
    nbytes = loss_in(setup.cross_entropy, model.program, setup.compute_dtype, fp32).itemsize
    return [Event(("scaled loss", i), nbytes) for i in range(count)]


def weights_are_moved(script: Script, model: Model, dtype: DType) -> None:
    """Allocate the weights one by one (Module.to(device))."""
    for i, n in enumerate(sizes_of(model)):
        script.comes(("weight", i), n * dtype.itemsize)


def weights_are_flattened(script: Script, g: int, group: Group, itemsize: int, *, roomy: bool) -> None:
    """Allocate the flat buffer of group `g` and free its weights. `roomy`: the buffer is made beside the weights; else of
    copies on the CPU."""
    elements = group.partition * group.ranks
    padding = elements - group.starts[-1]
    script.empties_cache()
    if roomy:
        if padding:
            script.comes("padding", padding * itemsize)
        script.comes(("flat", g), elements * itemsize)
        script.goes(*(["padding"] if padding else []), *(("weight", i) for i in group.places))
    else:
        for i in group.places:
            script.comes(("stub", i), NUMBER)
            script.goes(("weight", i))
        script.empties_cache()
        script.comes(("flat", g), elements * itemsize)
        script.goes(*(("stub", i) for i in group.places))


# --- stage 0


def _made_0(model: Model, setup: Setup) -> list[Event]:
    """Return the events of FP16_Optimizer.__init__: the flat buffer is made of clones; the states come with a step over
    zeros."""
    script, dtype = Script(), setup.compute_dtype
    weights_are_moved(script, model, dtype)
    if not setup.has_master_weights:
        return script.events
    sizes = sizes_of(model)
    groups = groups_of(model, setup.averaging)
    for g, group in enumerate(groups):
        for i in group.places:
            script.comes(("clone", i), sizes[i] * dtype.itemsize)
        script.comes(("flat", g), group.starts[-1] * dtype.itemsize)
        script.goes(*(("clone", i) for i in reversed(group.places)))
        script.goes(*(("weight", i) for i in group.places))
        script.comes("flat, cloned", group.starts[-1] * dtype.itemsize)
        script.comes(("master", g), group.starts[-1] * fp32.itemsize)
        script.goes("flat, cloned")
    _zeros_and_states(script, setup, [group.starts[-1] for group in groups])
    return script.events


def _zeros_and_states(script: Script, setup: Setup, sizes: list[int]) -> None:
    """Run initialize_optimizer_states, which takes a step."""
    for g, n in enumerate(sizes):
        script.comes(("zeros", g), n * fp32.itemsize)
    for g, n in enumerate(sizes):
        states_come(script, setup, g, n)
    script.goes(*(("zeros", g) for g in range(len(sizes))))


def _closing_0(model: Model, setup: Setup) -> list[Event]:
    """Return the events of allreduce_gradients: copies of the gradients, call by call (buffered_allreduce_fallback)."""
    script, dtype, sent = Script(), setup.compute_dtype, sent_dtype(setup)
    for kind in kinds_of(model, setup.averaging):
        joined: list[int] = []
        for k, n in enumerate(kind.sizes):
            joined.append(n)
            if sum(joined) > ALL_REDUCE_BUCKET or k + 1 == len(kind.sizes):
                copies_of_a_call(script, joined, dtype, sent)
                joined = []
    return script.events


def copies_of_a_call(script: Script, slices: list[int], dtype: DType, sent: DType) -> None:
    """Allocate and free the copies of one all-reduce call. A single slice is reduced without a joined copy
    (flatten)."""
    made: list[str] = []
    if len(slices) > 1:
        made.append("joined")
        script.comes("joined", sum(slices) * dtype.itemsize)
    if sent is not dtype:
        made.append("cast")
        script.comes("cast", sum(slices) * sent.itemsize)
    script.goes(*reversed(made))


def _step_0(model: Model, setup: Setup, *, first: bool) -> list[Event]:
    """Return the events of FP16_Optimizer.step: group by group gradients are cast, joined, and freed."""
    script, sizes = Script(), sizes_of(model)
    groups = groups_of(model, setup.averaging)
    for g, group in enumerate(groups):
        for i in group.places:
            script.comes(("cast", i), sizes[i] * fp32.itemsize)
        script.comes(("joined", g), group.starts[-1] * fp32.itemsize)
        script.goes(*(("cast", i) for i in reversed(group.places)))
        script.goes(*(("gradient", i) for i in group.places))
    script.goes(*(("joined", g) for g in range(len(groups))))
    return script.events


def _plain_step_0(model: Model, setup: Setup, *, first: bool) -> list[Event]:
    """Return the events of FusedAdam over the weights themselves."""
    script, sizes = Script(), sizes_of(model)
    places = [i for group in groups_of(model, setup.averaging) for i in group.places]
    for i in places if first else ():
        states_come(script, setup, i, sizes[i])
    script.goes(*(("gradient", i) for i in places))
    return script.events


# --- stages 1 and 2


class _Layout:
    """One rank's parts of the flat buffers."""

    def __init__(self, model: Model, setup: Setup, own: Owned, rank: int) -> None:
        self.model, self.setup, self.partitions, self.rank = model, setup, own, rank
        self.dtype = setup.compute_dtype
        self.groups = groups_of(model, setup.shards)
        self.sizes = sizes_of(model)

    def before_first_step(self, *, roomy: bool) -> list[Event]:
        """Return the events of __init__. `roomy`: the flat buffer is made beside the weights; else of copies on the
        CPU."""
        script, itemsize = Script(), self.dtype.itemsize
        weights_are_moved(script, self.model, self.dtype)
        for g, (group, part) in enumerate(zip(self.groups, self.partitions, strict=True)):
            weights_are_flattened(script, g, group, itemsize, roomy=roomy)
            if self.dtype is fp32:
                script.comes(("master", g), part.size * itemsize)
            else:
                script.comes("partition, cloned", part.size * itemsize)
                script.comes(("master", g), part.size * fp32.itemsize)
                script.goes("partition, cloned")
        for g, part in enumerate(self.partitions):
            script.comes(("zeros", g), part.size * fp32.itemsize)
        script.goes(*(("zeros", g) for g in range(len(self.partitions))))
        return script.events

    def closing_2(self) -> list[Event]:
        script = Script()
        self._paddings_come(script)
        return script.events

    def closing_1(self) -> list[Event]:
        """Return the events of reduce_gradients, bucket by bucket. A gradient larger than the bucket stays where it
        is."""
        script, most = Script(), self.setup.reduce_bucket_size
        assert most is not None
        layout = flat(self.model, self.setup.shards)
        order = reduced_in_order(self.model, layout)
        there, left = False, [*order]
        for bucket in buckets_before_exceeding([self.sizes[i] for i in order], most):
            places = [order[k] for k in bucket]
            moved = [i for i in places if self.sizes[i] <= most]
            script.goes(*(("gradient", i) for i in moved))
            left = [i for i in left if i not in set(moved)]
            numbers = [layout.order[i] for i in places]
            for call in layout.all_reduces(numbers, most):
                copies_of_a_call(script, call.slices, self.dtype, sent_dtype(self.setup))
            if any(part.touches(numbers) for part in self.partitions):
                if not there:
                    script.comes(OWNED, whole_of(self.partitions) * self.dtype.itemsize)
                there = True
                large = [i for i, k in zip(places, numbers, strict=True) if i not in moved and self._touches(k)]
                script.goes(*(("gradient", i) for i in large))
                left = [i for i in left if i not in large]
        self._paddings_come(script)
        script.goes(BUCKET, *(("gradient", i) for i in left))
        return script.events

    def _touches(self, number: int) -> bool:
        return any(part.first <= number < part.end for part in self.partitions)

    def _paddings_come(self, script: Script) -> None:
        """Allocate the padding of partitions (get_flat_partition)."""
        for g, part in enumerate(self.partitions):
            if part.padding:
                script.comes(("padding", g), part.padding * self.dtype.itemsize)

    def step(self, *, first: bool) -> list[Event]:
        """Return the events of the step: the norm, slice by slice in fp64, then the update, group by group."""
        script = Script()
        for g, (group, part) in enumerate(zip(self.groups, self.partitions, strict=True)):
            self._norm(script, g, _slices(group, part, self.rank // group.alike))
        owns = whole_of(self.partitions) > 0
        for g, part in enumerate(self.partitions):
            self._update(script, g, part, owns=owns and g + 1 == len(self.partitions), first=first)
        script.goes(*(("norm of a group", g) for g in range(len(self.partitions))))
        return script.events

    def _norm(self, script: Script, g: int, slices: list[int]) -> None:
        for k, n in enumerate(slices):
            script.comes("in fp64", n * fp64.itemsize)
            script.comes(("norm", k), fp64.itemsize)
            script.goes("in fp64")
        script.comes(("norm of a group", g), NUMBER)
        script.goes(*(("norm", k) for k in range(len(slices))))

    def _update(self, script: Script, g: int, part: Partition, *, owns: bool, first: bool) -> None:
        """Update one group. `owns`: it is the last group, whose update frees the block of all gradients."""
        joined = part.slices + (part.padding > 0) > 1
        casts = self.dtype is not fp32
        if joined:
            script.comes("joined", part.size * self.dtype.itemsize)
        if casts:
            script.comes("in fp32", part.size * fp32.itemsize)
            script.goes(*(["joined"] if joined else []))
        viewed = not joined and not casts  # the update reads the slice itself
        rest = [*([OWNED] if owns else []), *([("padding", g)] if part.padding else [])]
        if not viewed:
            script.goes(*rest)
        if first:
            states_come(script, self.setup, g, part.size)
        steps(script, self.setup, part.size)
        script.goes(*(["in fp32"] if casts else ["joined"] if joined else []))
        if viewed:
            script.goes(*rest)


def _slices(group: Group, part: Partition, rank: int) -> list[int]:
    """Return the elements of each parameter in a rank's part."""
    start, end = rank * group.partition, (rank + 1) * group.partition
    places = range(part.first - group.first, part.end - group.first)
    return [min(group.starts[i + 1], end) - max(group.starts[i], start) for i in places]
