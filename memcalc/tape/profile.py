"""The profile of a model's forward and backward: which bytes are alive at every moment that could be a peak.

A profile comes from running the program on paper. It is symbolic in batch and seq (sizes are polynomials in them) and is
extended in depth: live bytes grow linearly along a stack of equal blocks. The program is run with four periods of layers,
and what is alive of one of the two middle ones is there once more for every period that the real stack has more. (Of the
one that is not the neighbour of what is running: a neighbour's blocks may be on their way, and those exist once.) The
moments of the first and of the last period are the two ends of the line that all moments in between lie on. A stack that is
not periodic after its first few layers is run as it is. An engine that acts around layers needs two periods at each end.

A moment that another one exceeds in every coefficient can never be the peak; what is left is a handful per phase, which is
what makes an estimate cost microseconds. Parameters, optimizer states and what an engine holds are not part of it: they
are rows of the engine, which sees each moment with the gradients that it has produced so far.
"""

from __future__ import annotations

import copy
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

from memcalc.core.amounts import bytes_of, undominated
from memcalc.core.dims import Poly, Shape, fixed_size, numel, workload_size
from memcalc.core.dtypes import DType, fp32
from memcalc.core.passes import passes
from memcalc.core.rows import Component, Row
from memcalc.core.selective import Policy
from memcalc.core.tensor import Memory
from memcalc.families.base.module import Hooks, Run, after_forward
from memcalc.kernels import TRANSFORMERS, Kernels
from memcalc.tape.peaks import peaks
from memcalc.tape.runs import NO_MIDDLE, Middle, Trace

if TYPE_CHECKING:
    from memcalc.families.base.program import Program


class HooksOf(Protocol):
    """An engine that does something around layers: `start` makes the hooks of one run."""

    def start(self, run: Run) -> Hooks: ...


@runtime_checkable
class Resizable(HooksOf, Protocol):
    """An engine whose runs differ in the sizes of its own blocks alone from those of one that is `alike`."""

    @property
    def alike(self) -> HooksOf: ...

    def resized(self, run: Trace) -> Trace:
        """The run of that one with the sizes of this."""
        ...


class Choices(NamedTuple):
    """This is what a program's run depends on besides sizes."""

    dtype: DType
    attention: str
    recompute: bool
    accumulating: bool
    padded: bool = False
    autocast: DType | None = None
    kernels: Kernels = TRANSFORMERS
    hooks: HooksOf | None = None
    policy: Policy | None = None
    """Of which ops a recomputed layer keeps the results."""
    buffer_dtype: DType | None = None
    """Of the modules' floating-point buffers, where the engine leaves them in another one than `dtype`."""
    recompute_layers: int | None = None
    """How many of the first layers are recomputed; None: all."""
    micro_batches: int = 1
    """Of a step, in one run: more where those after the first find what it has left."""


class Moment(NamedTuple):
    """One moment that could be a peak: live activations and temporaries as a polynomial, and gradients produced so far."""

    poly: Poly
    gradients: int
    place: int


class Profile:
    """All moments of forward and backward that could be a peak, what is saved in between and what is left behind."""

    def __init__(self, run: Trace) -> None:
        forward, backward, saved, left = peaks(run)
        self.run = run
        self.forward = _moments(forward)
        self.backward = _moments(backward)
        self.saved = Moment(*bytes_of(saved), run.forward_end)
        self.left = Moment(*bytes_of(left), len(run.log))
        """After backward: what modules keep besides parameters and buffers, and what a graph keeps that has run."""
        self._rows: dict[int, list[Row]] = {}

    @property
    def pads_queries(self) -> bool:
        """Tell whether it holds only for sequences of the same remainder."""
        return self.run.pads_queries

    @property
    def moments(self) -> tuple[Moment, ...]:
        return (*self.forward, *self.backward, self.saved, self.left)

    def rows(self, moment: Moment) -> list[Row]:
        """Return what is alive at a moment, one row for equal blocks of all layers."""
        if moment.place not in self._rows:
            self._rows[moment.place] = _collapse(self.run, moment.place, *self._stay)
        return self._rows[moment.place]

    @cached_property
    def _stay(self) -> tuple[set[int], set[int]]:
        """The blocks that forward leaves for backward, and those that are there when the run is over."""
        return _saved(self.run), _stays(self.run)


def trace(program: Program, choices: Choices, batch: int, seq: int, depth: int, middle: Middle = NO_MIDDLE) -> Trace:
    """Run the program's forward and backward on paper with `depth` layers, or trace the module that stands for it."""
    memory = Memory(dict(choices.kernels.replaced))
    size = workload_size(batch, seq) if program.polynomial else fixed_size(batch, seq)
    whole = program.whole(size.seq)
    run = Run(memory, choices.dtype, choices.attention, choices.recompute, size.batch, whole, choices.accumulating)
    run.policy, run.buffer_dtype, run.recompute_layers = choices.policy, choices.buffer_dtype, choices.recompute_layers
    if program.source:
        forward_end = program.traced_step(run)
        return Trace(
            memory.log,
            memory.rows,
            memory.segments,
            forward_end,
            middle,
            program.source,
            work=tuple(memory.work),
            renamed=frozenset(memory.renamed),
        )
    program = copy.copy(program)
    program.layers = depth
    run.tensor_parallel = program.tensor_parallel
    run.external = program.external
    for weight in program.weights():
        run.add_weight(weight)
    if choices.hooks is not None:
        run.hooks = choices.hooks.start(run)
    for buffer in after_forward(program.buffers(), program.length(size.seq)):
        run.add_buffer(buffer)
    batch_of = program.give(run)
    if choices.padded:
        run.attention_mask = run.add_input(program.padding(size.batch, size.seq))
    ends, _loss = passes(program, run, choices.autocast, choices.micro_batches, batch_of)  # held until the next one
    return Trace(
        list(memory.log), memory.rows, memory.segments, ends[0], middle, "", choices.kernels, tuple(memory.sent),
        tuple(memory.work), ends if len(ends) > 1 else (), tuple(run.sent_once), renamed=frozenset(memory.renamed),
        noted=run.noted, pads_queries=memory.pads_queries,
    )  # fmt: skip


def gradient_order(program: Program, autocast: DType | None = None) -> list[tuple[str, int]]:
    """(weight class, elements) of every gradient in the order in which backward has it ready, tied weights last."""
    lead, period = program.pattern() or (program.layers, 0)
    more = (program.layers - lead) // period - 1 if period else 0
    depth = program.layers - more * period
    seq = 16 if program.source else 2  # a real module may want more tokens than two
    run = trace(program, Choices(fp32, program.attention_kinds[0], False, False, False, autocast), 1, seq, depth)
    ready = [row for row in run.rows if row.component == "gradients"]
    sized = [(row.name, numel(row.shape)[0]) for row in ready]
    last = [i for i, row in enumerate(ready) if row.layer is not None and row.layer >= depth - period]
    if not last:
        return sized
    first, end = last[0], last[-1] + 1
    return [*sized[:first], *sized[first:end] * (more + 1), *sized[end:]]


def profile(program: Program, choices: Choices, batch: int, seq: int) -> Profile:
    """The profile of a program. `batch` and `seq` only decide branches: the result holds for all that take the same."""
    # Hooks reach into neighbours: what the first and the last layer lack, a prefetch or a reduction, all others have.
    return Profile(_cut_trace(program, choices, batch, seq, ends=1 if choices.hooks is None else 2))


def _cut_trace(program: Program, choices: Choices, batch: int, seq: int, ends: int) -> Trace:
    """A run without most of the layers that repeat, so many periods at each end of them; of all where too few do."""
    start, end, period = _longest(program, choices.recompute_layers)
    first = start + ends * period + (end - start) % period if period else 0
    if not period or (end - start) // period < 2 * ends + 3:
        return trace(program, choices, batch, seq, program.layers)
    early, late = range(first, first + period), range(first + period, first + 2 * period)
    more = (end - first) // period - 2 - ends
    recomputed, left_out = choices.recompute_layers, more * period
    if recomputed is not None and first < recomputed:
        choices = choices._replace(recompute_layers=recomputed - left_out)
    return trace(program, choices, batch, seq, program.layers - left_out, Middle(early, late, more))


def _longest(program: Program, recomputed: int | None) -> tuple[int, int, int]:
    """Return the longest part of the stack that repeats, and its period, 0 if none does. Where the first layers alone are
    recomputed, they are a part and the others are one."""
    pattern = program.pattern()
    if pattern is None:
        return 0, 0, 0
    (lead, period), layers = pattern, program.layers
    if recomputed is None or recomputed >= layers:
        return lead, layers, period
    parts = (lead, recomputed), (max(lead, recomputed), layers)
    return (*max(parts, key=lambda part: part[1] - part[0]), period)


def full_profile(program: Program, choices: Choices, batch: int, seq: int) -> Profile:
    """The profile from a run at the real depth."""
    return Profile(trace(program, choices, batch, seq, program.layers))


def shallow_trace(program: Program, choices: Choices, batch: int, seq: int) -> Trace:
    """A run of few layers where the stack is periodic, for an engine that acts around layers."""
    return _cut_trace(program, choices, batch, seq, ends=2)


def profile_of_steps(run: Trace) -> Profile:
    """The profile of a run of several micro-batches; saved is what the forward with most of it leaves."""
    early, copies, saved = run.middle.early, run.copies(), _saved(run) - _stays(run)
    sizes = [
        numel(row.shape)[0] * row.dtype.itemsize * run.times(row, early) * (1 + run.repeated.more if i in copies else 1)
        if row.component == "activation" and i in saved
        else 0
        for i, row in enumerate(run.rows)
    ]
    ends, live, most, forward_end = set(run.forward_ends), 0, -1, 0
    for place, event in enumerate(run.log):
        if place in ends and live > most:
            most, forward_end = live, place
        live += sizes[event] if event >= 0 else -sizes[~event]
    return Profile(run._replace(forward_end=forward_end))


def _moments(peaks: dict[int, int]) -> tuple[Moment, ...]:
    """The moments that no other one reaches, whatever batch and seq and however gradients count."""
    return tuple(Moment(*bytes_of(live), peaks[live]) for live in undominated(peaks))


def _alive(run: Trace, place: int) -> set[int]:
    """The blocks alive just before `place` in the log."""
    alive: set[int] = set()
    for event in run.log[:place]:
        if event >= 0:
            alive.add(event)
        else:
            alive.discard(~event)
    return alive


class _Kind(NamedTuple):
    """Blocks that one row stands for."""

    component: Component
    name: str
    shape: Shape
    dtype: DType


def _saved(run: Trace) -> set[int]:
    """The blocks that a forward leaves for its backward."""
    if not run.forward_ends:
        return _alive(run, run.forward_end)
    ends, phases = set(run.forward_ends), {place: phase for place, phase, _ in run.segments}
    of_this: set[int] = set()
    saved: set[int] = set()
    phase = ""
    for place, event in enumerate(run.log):
        if place in ends:
            saved |= of_this
            of_this = set()
        phase = phases.get(place, phase)
        if event < 0:
            of_this.discard(~event)
        elif phase == "forward":  # not a gradient that waits to be sent
            of_this.add(event)
    return saved


def _stays(run: Trace) -> set[int]:
    """The blocks that are there when the run is over; of a step of several micro-batches also under the numbers that they
    had before, as the losses, which the caller gets."""
    out = _alive(run, len(run.log))
    if run.forward_ends:
        out |= {~run.log[place] for place in run.renamed if run.log[place + 1] in out}
    return out


def _census(run: Trace, place: int, saved: set[int], left: set[int]) -> Counter[_Kind]:
    """How many blocks of each kind are alive.

    What is alive at the end of forward too is a saved activation, what is at the end of backward as good as a buffer.
    """
    away, copies = run.away(place), run.copies()
    out: Counter[_Kind] = Counter()
    for i in sorted(_alive(run, place)):
        row = run.rows[i]
        times = run.times(row, away) * (1 + run.repeated.more if i in copies else 1)
        if row.component == "gradients":
            out[_Kind("gradients", row.name, row.shape, row.dtype)] += times
        elif row.component == "activation":
            component = "buffers" if i in left else "saved_activations" if i in saved else "temporaries"
            out[_Kind(component, row.label, row.shape, row.dtype)] += times
        elif row.component == "gathered":
            out[_Kind("buffers", row.label, row.shape, row.dtype)] += times
    return out


_LIVES: Final[dict[str, str]] = {
    "gradients": "backward to step",
    "saved_activations": "forward to backward",
    "temporaries": "within the phase",
    "buffers": "kept after backward",
}


def _source(run: Trace, component: Component) -> str:
    if run.source:
        return run.source
    return "torch/csrc/autograd/functions/accumulate_grad.cpp" if component == "gradients" else run.kernels.source


def _collapse(run: Trace, place: int, saved: set[int], left: set[int]) -> list[Row]:
    return [
        Row(
            kind.component,
            kind.name,
            kind.shape,
            kind.dtype,
            count,
            _LIVES[kind.component],
            basis="traced" if run.source else run.kernels.basis,
            source=_source(run, kind.component),
        )
        for kind, count in _census(run, place, saved, left).items()
    ]
