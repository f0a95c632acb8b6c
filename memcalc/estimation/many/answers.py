"""Peaks and collectives of setups that have the same polynomials."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.core.unknowns import Number, Undecided
from memcalc.engines.ranks import ranks
from memcalc.estimation.estimate import PHASES, left_by
from memcalc.estimation.many.polynomials import MOST, TooLarge, Values, Wholes, heights_of, total
from memcalc.hardware.cost import Unknown, path_of, seconds_of
from memcalc.layout.collectives import wire_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memcalc.core.unknowns import Whole
    from memcalc.engines.ranks import Rank
    from memcalc.inputs.gpu import GPU
    from memcalc.inputs.model import Model
    from memcalc.layout.collectives import Collective
    from memcalc.setup.setup import Setup

AXES: Final = ("dp", "tp", "pp", "cp", "ep")
QUERIES: Final = 32
Columns = dict[str, npt.NDArray[Any]]


def columns(count: int, gpu: GPU | None) -> Columns:
    """Room for the answers of so many setups."""
    whole = [*PHASES, "rank", *(f"{what} {axis}" for what in ("payload", "wire") for axis in AXES)]
    out: Columns = {name: np.zeros(count, np.int64) for name in whole}
    if gpu is not None:
        out |= {f"seconds {axis}": np.zeros(count) for axis in AXES}
    return out | {"too large": np.zeros(count, np.bool_), "refused": np.zeros(count, np.bool_)}


class Alike(NamedTuple):
    """Setups that differ in three numbers alone, and go the same way but for what these may still decide."""

    setup: Setup
    """One of them."""
    places: npt.NDArray[np.intp]
    batch: Wholes
    rows: Wholes
    micro_batches: Wholes

    def split(self) -> Iterator[Alike]:
        """Return parts that have fewer numbers: of micro-batches, then of what a kernel pads, then of all."""
        if self.micro_batches.min() < self.micro_batches.max():
            yield from self._by(self.micro_batches)
        elif len({*(self.rows % QUERIES).tolist()}) > 1:
            yield from self._by(self.rows % QUERIES)
        else:
            yield from self._by(self.batch * (int(self.rows.max()) + 1) + self.rows)

    def _by(self, keys: Wholes) -> Iterator[Alike]:
        for own in same(keys):
            batch, rows, micro = self.batch[own], self.rows[own], self.micro_batches[own]
            numbers = {"micro_batch_size": int(batch[0]), "seq_len": int(rows[0]) * self.setup.parts}
            global_batch = self.setup.dp * int(batch[0]) * int(micro[0])
            setup = self.setup._replace(**numbers, global_batch_size=global_batch)
            yield Alike(setup, self.places[own], batch, rows, micro)


def same(keys: npt.NDArray[Any]) -> list[npt.NDArray[np.intp]]:
    """The places of each number that there is."""
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(np.diff(keys[order])) + 1
    return np.split(order, ends)


def answer(model: Model, alike: Alike, gpu: GPU | None, out: Columns) -> None:
    """Write the answers of these setups. InputError where all of them are refused."""
    values = Values(alike.batch, alike.rows, alike.micro_batches)
    try:
        _answer(model, alike, values, gpu, out)
    except Undecided:
        for part in alike.split():
            answer(model, part, gpu, out)
    except TooLarge:
        _answer(model, alike, Values(*values.arrays, large=True), gpu, out)


def _answer(model: Model, alike: Alike, values: Values, gpu: GPU | None, out: Columns) -> None:
    micro_batches = values.number(2)
    setup = _with_numbers(alike.setup, alike.setup.micro_batch_size, alike.setup.rows, micro_batches)
    found = ranks(model, setup)
    pads = any(profile.pads_queries for rank in found for profile in rank.profiles)
    if pads and len({*(alike.rows % QUERIES).tolist()}) > 1:
        raise Undecided("a kernel pads queries")
    worst = _Worst(values.count)
    for place, rank in enumerate(found):
        left = total(left_by(rank))
        worst.meet(place, rank, {phase: of.at(values) for phase, of in heights_of(rank, left).items()})
    which, phases = worst.found()
    results: dict[str, Any] = {**phases, "rank": np.array([rank.number for rank in found])[which]}
    for name, result in results.items():
        _write(out, name, alike.places, result)
    numbers = _with_numbers(setup, values.number(0), values.number(1), micro_batches)
    for place, rank in enumerate(found):
        own = np.flatnonzero(which == place)
        if len(own):
            part = values if len(own) == values.count else values.of(own)
            for name, result in _sent(rank.collectives(numbers), numbers, part, gpu):
                _write(out, name, alike.places[own], result)


def _with_numbers(setup: Setup, batch: Whole, rows: Whole, micro_batches: Whole) -> Setup:
    """The setup with three numbers, of which any may be unknown."""
    numbers: Any = {
        "micro_batch_size": batch,
        "seq_len": rows * setup.parts if isinstance(rows, Number) else setup.seq_len,
        "global_batch_size": setup.dp * batch * micro_batches,
    }
    return setup._replace(**numbers)


def _write(out: Columns, name: str, places: npt.NDArray[np.intp], result: Any) -> None:
    """A column's numbers; those that 64 bits have no room for are marked."""
    column = out[name]
    if getattr(result, "dtype", None) == object and column.dtype == np.int64:
        over = result > MOST
        out["too large"][places] |= over.astype(np.bool_)
        result = np.where(over, 0, result).astype(np.int64)
    column[places] = result


class _Worst:
    """For each setup the rank that is reported: of the ranks of a stage that with the highest peak, and among these that with
    most in backward; of the stages the first that has the highest peak."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._of_stages: dict[int, tuple[Any, dict[str, Any], Any]] = {}

    def meet(self, place: int, rank: Rank, phases: dict[str, Any]) -> None:
        peak = np.maximum(np.maximum(phases["forward"], phases["backward"]), phases["step"])
        which = np.full(self._count, place)
        before = self._of_stages.get(rank.number)
        if before is not None:
            most, earlier, of = before
            equal = (peak == most) & (phases["backward"] > earlier["backward"])
            better = (peak > most) | equal
            peak, which = np.where(better, peak, most), np.where(better, which, of)
            phases = {phase: np.where(better, size, earlier[phase]) for phase, size in phases.items()}
        self._of_stages[rank.number] = peak, phases, which

    def found(self) -> tuple[Any, dict[str, Any]]:
        """The places of the ranks that are reported, and their phases."""
        [(most, phases, which), *others] = self._of_stages.values()
        for peak, own, of in others:
            better = peak > most
            most, which = np.where(better, peak, most), np.where(better, of, which)
            phases = {phase: np.where(better, own[phase], size) for phase, size in phases.items()}
        return which, phases


def _sent(
    collectives: Iterable[Collective], setup: Setup, values: Values, gpu: GPU | None
) -> Iterator[tuple[str, Any]]:
    """Payload, wire and seconds of each axis, a column each."""
    sent = list(collectives)
    sums: dict[str, Any] = defaultdict(int)
    for one in sent:
        payload: Any = one.payload
        size = values.at(payload, 2 * max(one.group_size, len(sent)))
        wire = wire_bytes(one.collective, one.group_size, size)
        found = {"payload": size, "wire": wire}
        if gpu is not None:
            found["seconds"] = _seconds(one, setup, gpu, values.at(one.calls), wire)
        for what, result in found.items():
            sums[f"{what} {one.axis}"] = sums[f"{what} {one.axis}"] + result
    yield from sums.items()


def _seconds(one: Collective, setup: Setup, gpu: GPU, calls: Any, wire: Any) -> Any:
    """Of all its calls; not a number where the time is not known."""
    path = path_of(one, setup, gpu)
    if isinstance(path, Unknown):
        return np.nan
    return seconds_of(one.collective, calls, wire, *path) if one.group_size > 1 else 0.0
