"""The profile of a model's forward and backward: the bytes alive at every moment that could be a peak.

A profile comes from running the program on paper. It is symbolic in batch and seq: sizes are polynomials in them. It is
extended in depth: live bytes grow linearly along a stack of equal blocks. The program is run with four periods of
layers. The blocks of one of the two middle periods count once more for every period that the real stack has in
addition. That is the middle period that is not adjacent to the running layer: a block of an adjacent period may be on
its way to the next layer, and exists once. The moments of the first and of the last period are the two ends of the line
that all moments in between lie on. A stack that is not periodic after its first few layers is run at its full depth. An
engine that acts around layers needs one more layer at each end.

A moment that another one exceeds in every coefficient can never be the peak. The few moments per phase that remain make
an estimate cost microseconds. Parameters, optimizer states and the engine's own buffers are not in the profile: they
are rows of the engine, which sees each moment with the gradients produced so far.
"""

from __future__ import annotations

import copy
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard

from memcalc.core.amounts import bytes_of, undominated
from memcalc.core.dims import Poly, Shape, fixed_size, numel, workload_size
from memcalc.core.dtypes import DType, fp32
from memcalc.core.passes import passes
from memcalc.core.selective import Policy
from memcalc.core.tensor import Memory
from memcalc.families.base.module import Run, after_forward
from memcalc.kernels import TRANSFORMERS, Kernels
from memcalc.tape.census import blocks_that_stay, rows_alive, saved_blocks
from memcalc.tape.runs import NO_MIDDLE, Middle, Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.dims import Dim, Size
    from memcalc.core.rows import Row
    from memcalc.core.tensor import StorageRow, Tensor
    from memcalc.families.base.program import Program
    from memcalc.families.base.replacing import Hooks
    from memcalc.tape.kernels import Pass, Product


class HooksOf(Protocol):
    """An engine that acts around layers. `start` returns the hooks of one run."""

    def start(self, run: Run) -> Hooks: ...


class Resizable(HooksOf, Protocol):
    """An engine whose runs differ from those of `alike` only in the sizes of its own blocks."""

    @property
    def alike(self) -> HooksOf: ...

    def resized(self, run: Trace) -> Trace:
        """Return the run of `alike` with the sizes of this engine."""
        ...

    def sized(self, dim: Dim) -> Dim:
        """Return a resizable dim of the run of `alike` as this engine has it."""
        ...


def is_resizable(hooks: HooksOf | None) -> TypeGuard[Resizable]:
    """Tell whether an engine's runs can be resized. `isinstance` with a protocol takes longer than a whole estimate."""
    return hasattr(hooks, "resized")


class Choices(NamedTuple):
    """Everything besides sizes that a program's run depends on."""

    dtype: DType
    attention: str
    recompute: bool
    accumulating: bool
    padded: bool = False
    autocast: DType | None = None
    kernels: Kernels = TRANSFORMERS
    hooks: HooksOf | None = None
    policy: Policy | None = None
    """Says which ops' results a recomputed layer keeps."""
    buffer_dtype: DType | None = None
    """The dtype of the modules' floating-point buffers, if the engine keeps them in another one than `dtype`."""
    recompute_layers: int | None = None
    """The number of layers that are recomputed, the first ones of the stack; None: all."""
    micro_batches: int = 1
    """The micro-batches of a step in one run. More than one are run if later ones find something that the first has
    left."""
    input_require_grads: bool = False
    """True if the output of the embeddings requires a gradient."""
    own_dtypes: bool = False
    """True if adapters keep a dtype of their own."""
    reentrant: bool = False
    """True if checkpoints re-enter autograd."""


class Moment(NamedTuple):
    """One moment that could be a peak: live activations and temporaries as a polynomial, and the bytes of gradients
    produced so far."""

    poly: Poly
    gradients: int
    place: int


class Profile:
    """All moments of forward and backward that could be a peak, the moment between the two, and the moment after
    them."""

    def __init__(self, run: Trace) -> None:
        from memcalc.tape.peaks import peaks

        forward, backward, saved, after_backward = peaks(run)
        self.run = run
        self.forward = moments_of(forward)
        self.backward = moments_of(backward)
        self.saved = Moment(*bytes_of(saved), run.forward_end)
        self.after_backward = Moment(*bytes_of(after_backward), len(run.log))
        """The moment after backward. Modules may keep more than parameters and buffers then, and so may a graph that
        has run."""
        self._rows: dict[int, list[Row]] = {}

    @property
    def pads_queries(self) -> bool:
        """Tell whether the profile holds only for sequences of the same remainder."""
        return self.run.pads_queries

    @cached_property
    def reference(self) -> tuple[Moment, ...]:
        """Return the moments of forward in which a reference model runs."""
        from memcalc.tape.peaks import peaks, within

        return moments_of(peaks(within(self.run, self.run.of_reference))[0])

    @property
    def moments(self) -> tuple[Moment, ...]:
        return (*self.forward, *self.backward, self.saved, self.after_backward)

    def rows(self, moment: Moment) -> list[Row]:
        """Return the rows alive at a moment, one row for equal blocks of all layers."""
        if moment.place not in self._rows:
            self._rows[moment.place] = rows_alive(self.run, moment.place, *self._stay)
        return self._rows[moment.place]

    def saved_by(self, layers: range) -> Poly:
        """Return the bytes that some layers of the run, as far as it has them, leave for backward."""
        total = [0] * 6
        for i in self._stay[0]:
            row = self.run.rows[i]
            if row.component == "activation" and row.layer is not None and row.layer in layers:
                for place, c in enumerate(numel(row.shape)[1]):
                    total[place] += c * row.dtype.itemsize
        return tuple(total)  # type: ignore[return-value]

    @cached_property
    def products(self) -> Counter[Product]:
        """Return the products of matrices at the real depth, each with its number."""
        from memcalc.tape.kernels import products_of

        return products_of(self.run)

    @cached_property
    def passes(self) -> list[Pass]:
        """Return the other kernels at the real depth."""
        from memcalc.tape.kernels import passes_of

        return passes_of(self.run)

    @cached_property
    def _stay(self) -> tuple[set[int], set[int]]:
        """Return the blocks that forward leaves for backward, and those alive when the run is over."""
        return saved_blocks(self.run), blocks_that_stay(self.run)


def trace(program: Program, choices: Choices, batch: int, seq: int, depth: int, middle: Middle = NO_MIDDLE) -> Trace:
    """Run the program's forward and backward on paper with `depth` layers, or trace the real module that the program
    stands for."""
    size = workload_size(batch, seq) if program.polynomial else fixed_size(batch, seq)
    run = _run(program, choices, size)
    memory = run.memory
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
            streamed=tuple(memory.streamed),
            renamed=frozenset(memory.renamed),
        )
    program = copy.copy(program)
    program.layers = depth
    in_closures: list[StorageRow] = []
    if choices.reentrant:
        from memcalc.tape.closures import left_in_closures

        again = _run(program, choices, size)
        in_closures = left_in_closures(program, again, choices.autocast, _given(program, again, choices, size))
    batch_of = _given(program, run, choices, size)
    given = run, choices.autocast, choices.micro_batches, batch_of, in_closures
    ends, _loss = passes(program, *given)  # held until the next one
    return Trace(
        list(memory.log), memory.rows, memory.segments, ends[0], middle, "", choices.kernels, tuple(memory.sent),
        tuple(memory.work), ends if len(ends) > 1 else (), tuple(run.sent_once), renamed=frozenset(memory.renamed),
        noted=run.noted, pads_queries=memory.pads_queries, streamed=tuple(memory.streamed), of_reference=tuple(run.of_reference),
        copied=tuple(run.copied),
    )  # fmt: skip


def _run(program: Program, choices: Choices, size: Size) -> Run:
    """Return a run that has nothing in its memory yet."""
    memory = Memory(dict(choices.kernels.replaced))
    sequences, whole = program.rows(program.sequences(size.batch), program.whole(size.seq))
    run = Run(memory, choices.dtype, choices.attention, choices.recompute, sequences, whole, choices.accumulating)
    run.policy, run.buffer_dtype, run.recompute_layers = choices.policy, choices.buffer_dtype, choices.recompute_layers
    run.reentrant, run.positional = choices.reentrant, program.positional
    run.input_require_grads = choices.input_require_grads
    run.noisy_embeddings = program.noisy_embeddings
    run.labelled = None if program.packed_rows is None else program.packed_rows.labelled
    return run


def _given(program: Program, run: Run, choices: Choices, size: Size) -> Sequence[Tensor]:
    """Allocate the weights, the buffers and the batch of a run. Returns the batch."""
    run.tensor_parallel = program.tensor_parallel
    run.adapters, run.own_dtypes = program.adapters, choices.own_dtypes
    run.external = (*program.external, *_read_by_the_loss(program, choices.kernels))
    for weight in program.weights():
        run.add_weight(weight, wants_gradient=program.wants_gradient(weight))
    if choices.hooks is not None:
        run.hooks = choices.hooks.start(run)
    for buffer in after_forward(program.buffers(), program.length(size.seq)):
        run.add_buffer(buffer)
    batch_of = program.give(run)
    if choices.padded:
        run.attention_mask = run.add_input(program.padding(run.batch, size.seq))
    return batch_of


def _read_by_the_loss(program: Program, kernels: Kernels) -> tuple[tuple[str, str], ...]:
    """Return the head's weight, which the model itself uses if its loss takes it."""
    return (("", f"{program.head_name}.weight"),) if kernels.reads_head else ()


def gradient_order(program: Program, autocast: DType | None = None) -> list[tuple[str, int]]:
    """Return the weight class and the elements of every gradient in the order in which backward has it ready, tied
    weights last."""
    return [(name, numel(shape)[0]) for name, shape in gradients_in_order(program, autocast)]


def gradients_in_order(program: Program, autocast: DType | None = None) -> list[tuple[str, Shape]]:
    """Return the weight class and the shape of every gradient in the order in which backward has it ready, tied weights
    last."""
    lead, period = program.pattern() or (program.layers, 0)
    more = (program.layers - lead) // period - 1 if period else 0
    depth = program.layers - more * period
    seq = 16 if program.source else 2  # a real module may need more tokens than two
    run = trace(program, Choices(fp32, program.attention_kinds[0], False, False, False, autocast), 1, seq, depth)
    ready = [row for row in run.rows if row.component == "gradients"]
    shaped = [(row.name, row.shape) for row in ready]
    last = [i for i, row in enumerate(ready) if row.layer is not None and row.layer >= depth - period]
    if not last:
        return shaped
    first, end = last[0], last[-1] + 1
    return [*shaped[:first], *shaped[first:end] * (more + 1), *shaped[end:]]


def profile(program: Program, choices: Choices, batch: int, seq: int) -> Profile:
    """Return the profile of a program. `batch` and `seq` only decide branches: the result holds for all values that
    take the same branches."""
    return Profile(cut_of(program, choices).run(program, batch, seq))


class Cut(NamedTuple):
    """The run with few layers that stands for the one at the real depth."""

    depth: int
    choices: Choices
    middle: Middle

    def run(self, program: Program, batch: int, seq: int) -> Trace:
        return trace(program, self.choices, batch, seq, self.depth, self.middle)


def cut_of(program: Program, choices: Choices) -> Cut:
    """Return the cut of a program, for the peaks of its run.

    Each end has a period of layers, whose moments stand for those of the periods between. Hooks act on neighbouring layers
    too: the first and the last layer lack a prefetch or a reduction that all others have. And a sum over layers is made in the
    last layer but one.
    """
    period = _longest(program, choices.recompute_layers)[2]
    if program.layers_add_up:
        return _cut(program, choices, ends=2 * period)
    return _cut(program, choices, ends=period if choices.hooks is None else period + 1)


def _cut(program: Program, choices: Choices, ends: int) -> Cut:
    """Return the cut with `ends` layers at each end of the layers that repeat, two middle periods, and any layers that do
    not fit a period. If too few periods repeat, it is all layers."""
    start, end, period = _longest(program, choices.recompute_layers)
    first = start + ends + (end - start - 2 * ends) % period if period else 0
    more = (end - ends - first) // period - 2 if period else 0
    if more < 1:
        return Cut(program.layers, choices, NO_MIDDLE)
    early, late = range(first, first + period), range(first + period, first + 2 * period)
    recomputed, left_out = choices.recompute_layers, more * period
    if recomputed is not None and first < recomputed:
        choices = choices._replace(recompute_layers=recomputed - left_out)
    return Cut(program.layers - left_out, choices, Middle(early, late, more))


def _longest(program: Program, recomputed: int | None) -> tuple[int, int, int]:
    """Return the longest part of the stack that repeats (first layer, end), and its period; the period is 0 if no part
    repeats.

    If only the first layers are recomputed, they are one part and the other layers another.
    """
    pattern = program.pattern()
    if pattern is None or program.offloads_activations:  # a moved tensor is held over several layers
        return 0, 0, 0
    (lead, period), layers = pattern, program.layers
    if recomputed is None or recomputed >= layers:
        return lead, layers, period
    parts = (lead, recomputed), (max(lead, recomputed), layers)
    return (*max(parts, key=lambda part: part[1] - part[0]), period)


def full_profile(program: Program, choices: Choices, batch: int, seq: int) -> Profile:
    """Return the profile of a run at the real depth."""
    return Profile(trace(program, choices, batch, seq, program.layers))


def shallow_trace(program: Program, choices: Choices, batch: int, seq: int) -> Trace:
    """Run the program with few layers if the stack is periodic, for the peaks of an engine that acts around layers."""
    period = _longest(program, choices.recompute_layers)[2]
    return _cut(program, choices, ends=2 * period if program.layers_add_up else period + 1).run(program, batch, seq)


def recorded_trace(program: Program, choices: Choices, batch: int, seq: int) -> Trace:
    """Run the program with few layers if the stack is periodic, for a log that is written out at the real depth. Of the middle
    periods it has the moments too, so the ends have only the layers that differ from all others. That is one of equal layers:
    the hooks note what an engine acts at later, and no layer depends on its neighbours."""
    alone = not program.layers_add_up and _longest(program, choices.recompute_layers)[2] == 1
    return _cut(program, choices, ends=1 if alone else 2).run(program, batch, seq)


def profile_of_steps(run: Trace) -> Profile:
    """Return the profile of a run of several micro-batches. `saved` is the end of the forward that leaves most
    bytes."""
    early, copies = run.middle.early, run.copies()
    sizes = [0] * len(run.rows)
    for i in saved_blocks(run) - blocks_that_stay(run):
        row = run.rows[i]
        if row.component == "activation":
            times = run.times(row, early) * (1 + run.repeated.more if i in copies else 1)
            sizes[i] = numel(row.shape)[0] * row.dtype.itemsize * times
    live = run.alive(sizes)
    places = sorted(place for place in set(run.forward_ends) if place < len(run.log))
    forward_end = max(places, key=live.__getitem__, default=0)
    return Profile(run._replace(forward_end=forward_end))


def moments_of(peaks: dict[int, int]) -> tuple[Moment, ...]:
    """Return the moments that no other one exceeds, for every batch, seq and weight of gradients."""
    return tuple(Moment(*bytes_of(live), peaks[live]) for live in undominated(peaks))
