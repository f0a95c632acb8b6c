"""The profile of a model's forward and backward: which bytes are alive at every moment that could be a peak.

A profile comes from running the program on paper. It is symbolic in batch and seq (sizes are polynomials in them) and is
extended in depth: live bytes grow linearly along a stack of equal blocks, so every moment of a deep stack lies on a line
through two shallow ones. The same program runs at two depths, the moments of the two runs are matched one by one, and each
is extended to the real depth. Where a stack is not periodic, or the moments do not match, the run has the full depth.

A moment that another one exceeds in every coefficient can never be the peak; what is left is a handful per phase, which is
what makes an estimate cost microseconds. Parameters, optimizer states and what an engine holds are not part of it: they
are rows of the engine, which sees each moment with the gradients that it has produced so far.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from operator import ge
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.autograd import backward
from memcalc.dims import Poly, Shape, evaluate, numel, workload_size
from memcalc.dtypes import DType, fp32, int64
from memcalc.families.module import Run
from memcalc.rows import Component, Row
from memcalc.tensor import Memory, StorageRow, new_tensor

if TYPE_CHECKING:
    from memcalc.families.llama import Llama

_DIGIT: Final = 64
_MASK: Final = (1 << _DIGIT) - 1
_LENGTH: Final = 7  # six coefficients and the bytes of gradients
_GRADIENTS: Final = _DIGIT * 6


class Choices(NamedTuple):
    """What a program's run depends on besides sizes."""

    dtype: DType
    attention: str
    recompute: bool
    accumulating: bool


class Moment(NamedTuple):
    """One moment that could be a peak: live activations and temporaries as a polynomial, and gradients produced so far."""

    poly: Poly
    gradients: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of a program at one depth."""

    depth: int
    log: list[int]
    rows: list[StorageRow]
    segments: list[tuple[int, str, int | None]]
    forward_end: int


@dataclass(frozen=True, slots=True)
class Profile:
    """All moments of forward and backward that could be a peak, and what is saved in between."""

    traces: tuple[Trace, ...]
    periods: int
    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    saved: Moment
    _rows: dict[tuple[int, ...], list[Row]] = field(default_factory=dict)

    def rows(self, moment: Moment) -> list[Row]:
        """What is alive at a moment, one row for equal blocks of all layers."""
        if moment.places not in self._rows:
            self._rows[moment.places] = _collapse(self, moment)
        return self._rows[moment.places]


def trace(program: Llama, choices: Choices, batch: int, seq: int, depth: int) -> Trace:
    """Run the program's forward and backward on paper with `depth` layers."""
    program = copy.copy(program)
    program.layers = depth
    memory = Memory()
    size = workload_size(batch, seq)
    run = Run(memory, choices.dtype, choices.attention, choices.recompute, size.batch, size.seq, choices.accumulating)
    for weight in program.weights():
        for layer in range(depth) if weight.layered else (None,):
            run.add_weight(weight, layer)
    for buffer in program.buffers():
        run.add_buffer(buffer)
    ids = new_tensor(memory, (size.batch, size.seq), int64, "input ids", component="buffers")
    memory.enter("forward", None)
    loss = program.forward(run, ids)
    memory.relabel(loss.storage, (), "buffers", "loss", None)  # the caller's, no longer the program's
    forward_end = len(memory.log)
    memory.enter("backward", None)
    backward(loss)
    return Trace(depth, list(memory.log), memory.rows, memory.segments, forward_end)


def gradient_order(program: Llama) -> list[tuple[str, int]]:
    """(weight class, elements) of every gradient in the order in which backward has it ready, tied weights last."""
    depth = min(program.layers, 2)
    run = trace(program, Choices(fp32, program.attention_kinds[0], False, False), 1, 2, depth)
    ready = [row for row in run.rows if row.component == "gradients"]
    sized = {row: (row.name, numel(row.shape)[0]) for row in ready}
    layered = [i for i, row in enumerate(ready) if row.layer is not None]
    one_layer = [sized[row] for row in ready if row.layer == depth - 1]
    before, after = ready[: layered[0]], ready[layered[-1] + 1 :]
    return [*(sized[r] for r in before), *one_layer * program.layers, *(sized[r] for r in after)]


def profile(program: Llama, choices: Choices, batch: int, seq: int) -> Profile:
    """The profile of a program. `batch` and `seq` only decide branches: the result holds for all that take the same."""
    depth, period = program.layers, program.period()
    if period is not None:
        first = 2 * period + depth % period
        if first + period < depth:
            short = trace(program, choices, batch, seq, first)
            long = trace(program, choices, batch, seq, first + period)
            extended = _extend(short, long, period, (depth - first) // period)
            if extended is not None:
                return extended
    return full_profile(program, choices, batch, seq)


def full_profile(program: Llama, choices: Choices, batch: int, seq: int) -> Profile:
    """The profile from one run at the real depth."""
    run = trace(program, choices, batch, seq, program.layers)
    peaks = _peaks(run)
    moments = [(peak.phase, Moment(*_unpack(peak.live), (peak.place,))) for peak in peaks]
    return _profile((run,), 0, moments)


class _Peak(NamedTuple):
    phase: str
    layer: int | None
    live: int
    place: int


def _peaks(run: Trace) -> list[_Peak]:
    """Every local maximum of live bytes (an allocation followed by a free or by another segment), and the end of forward."""
    packed = [_pack(row.shape, row.dtype, row.component) for row in run.rows]
    begins = {place: (phase, layer) for place, phase, layer in run.segments}
    out: list[_Peak] = []
    live, rising, phase, layer = 0, False, "", None
    for place, event in enumerate(run.log):
        if place in begins or place == run.forward_end:
            if rising or place == run.forward_end:
                out.append(_Peak("saved" if place == run.forward_end else phase, layer, live, place))
                rising = False
            phase, layer = begins.get(place, (phase, layer))
        if event >= 0:
            live += packed[event]
            rising = True
        else:
            if rising:
                out.append(_Peak(phase, layer, live, place))
                rising = False
            live -= packed[~event]
    if rising:
        out.append(_Peak(phase, layer, live, len(run.log)))
    return [peak for peak in out if peak.phase]


@lru_cache(maxsize=16384)
def _pack(shape: Shape, dtype: DType, component: str) -> int:
    """The coefficients of a block's bytes in one integer, so that a moment is one addition."""
    size, poly = numel(shape)
    if component == "gradients":
        return size * dtype.itemsize << _GRADIENTS
    if component != "activation":
        return 0
    return sum(c * dtype.itemsize << _DIGIT * i for i, c in enumerate(poly) if c)


def _unpack(live: int) -> tuple[Poly, int]:
    digits = [(live >> _DIGIT * i) & _MASK for i in range(_LENGTH)]
    return tuple(digits[:6]), digits[6]  # type: ignore[return-value]


def _extend(short: Trace, long: Trace, period: int, periods: int) -> Profile | None:
    """Match the moments of two depths and extend each along its line; None if they do not match."""
    front = period + short.depth % period

    def aligned(peak: _Peak) -> int | None:
        return peak.layer - period if peak.layer is not None and peak.layer >= front else peak.layer

    shallow = _peaks(short)
    deep = [p for p in _peaks(long) if p.layer is None or not front <= p.layer < front + period]
    if [(p.phase, p.layer) for p in shallow] != [(p.phase, aligned(p)) for p in deep]:
        return None
    moments: list[tuple[str, Moment]] = []
    for a, b in zip(shallow, deep, strict=True):
        (poly_a, gradients_a), (poly_b, gradients_b) = _unpack(a.live), _unpack(b.live)
        poly = tuple(x + periods * (y - x) for x, y in zip(poly_a, poly_b, strict=True))
        gradients = gradients_a + periods * (gradients_b - gradients_a)
        moments.append((a.phase, Moment(poly, gradients, (a.place, b.place))))  # type: ignore[arg-type]
    return _profile((short, long), periods, moments)


def _profile(traces: tuple[Trace, ...], periods: int, moments: list[tuple[str, Moment]]) -> Profile:
    (saved,) = [moment for phase, moment in moments if phase == "saved"]
    return Profile(
        traces,
        periods,
        _undominated([moment for phase, moment in moments if phase == "forward"]),
        _undominated([moment for phase, moment in moments if phase == "backward"]),
        saved,
    )


def _undominated(moments: list[Moment]) -> tuple[Moment, ...]:
    """The moments that no other one reaches, whatever batch and seq (from 1 up) and however gradients count."""
    unique = {(*_from_one(m.poly), m.gradients): m for m in reversed(moments)}
    kept: list[tuple[int, ...]] = []
    for key in sorted(unique, key=sum, reverse=True):
        for other in kept:
            if all(map(ge, other, key)):
                break
        else:
            kept.append(key)
    return tuple(unique[key] for key in kept)


def _from_one(poly: Poly) -> Poly:
    """The polynomial in (batch - 1) and (seq - 1): none of its coefficients can be made up for by another one's size."""
    c0, c1, c2, b0, b1, b2 = poly
    return (c0 + c1 + c2 + b0 + b1 + b2, c1 + 2 * c2 + b1 + 2 * b2, c2 + b2, b0 + b1 + b2, b1 + 2 * b2, b2)


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


def _census(run: Trace, place: int) -> Counter[_Kind]:
    """How many blocks of each kind are alive. What was alive at the end of forward too is a saved activation."""
    kept = _alive(run, run.forward_end)
    out: Counter[_Kind] = Counter()
    for i in _alive(run, place):
        row = run.rows[i]
        if row.component == "gradients":
            out[_Kind("gradients", row.name, row.shape, row.dtype)] += 1
        elif row.component == "activation":
            out[_Kind("saved_activations" if i in kept else "temporaries", _name(row), row.shape, row.dtype)] += 1
    return out


_LIVES: Final[dict[str, str]] = {
    "gradients": "backward to step",
    "saved_activations": "forward to backward",
    "temporaries": "within the phase",
}


def _collapse(profile: Profile, moment: Moment) -> list[Row]:
    counts = [_census(run, place) for run, place in zip(profile.traces, moment.places, strict=True)]
    if len(counts) == 2:
        short, long = counts
        counts = [Counter({k: short[k] + profile.periods * (long[k] - short[k]) for k in dict.fromkeys([*short, *long])})]
    # Dims of two runs are different objects: what looks the same is the same row.
    merged: dict[tuple[object, ...], tuple[_Kind, int]] = {}
    for kind, count in counts[0].items():
        key = (kind.component, kind.name, tuple((d.name, d.size) for d in kind.shape), kind.dtype)
        merged[key] = (kind, merged.get(key, (kind, 0))[1] + count)
    return [
        Row(kind.component, kind.name, kind.shape, kind.dtype, count, _LIVES[kind.component])
        for kind, count in merged.values()
        if count
    ]


def _name(row: StorageRow) -> str:
    if not row.scope or row.name.startswith(row.scope):
        return row.name
    return f"{row.scope}: {row.name}"


def poly_bytes(moment: Moment, batch: int, seq: int) -> int:
    """Live activations and temporaries at a moment."""
    return evaluate(moment.poly, batch, seq)

