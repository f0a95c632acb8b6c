"""The peaks and collectives of setups that have the same polynomials."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.core.ops.attention import ALIGNED_QUERIES
from memcalc.core.unknowns import Undecided
from memcalc.device.shown import kernels_of, workspaces_of
from memcalc.engines.ranks import ranks
from memcalc.estimation.many.polynomials import MOST, Numbers, TooLarge, Values, Wholes, heights_of, total
from memcalc.estimation.report import PHASES, buffers_after_backward
from memcalc.hardware.cost import Unknown, path_of, seconds_of
from memcalc.layout.collectives import wire_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memcalc.core.unknowns import Whole
    from memcalc.engines.rank import Rank
    from memcalc.inputs.gpu import GPU
    from memcalc.inputs.model import Model
    from memcalc.layout.collectives import Collective
    from memcalc.setup.setup import Setup

AXES: Final = ("dp", "tp", "pp", "cp", "ep")
Columns = dict[str, Numbers]


def columns(count: int, gpu: GPU | None) -> Columns:
    """Return one empty column per answer, for `count` setups."""
    whole = [*PHASES, "rank", "workspaces", *(f"{what} {axis}" for what in ("payload", "wire") for axis in AXES)]
    out: Columns = {name: np.zeros(count, np.int64) for name in whole}
    if gpu is not None:
        out |= {f"seconds {axis}": np.zeros(count) for axis in AXES}
    return out | {"too large": np.zeros(count, np.bool_), "refused": np.zeros(count, np.bool_)}


class Alike(NamedTuple):
    """Setups that differ in three numbers alone and take the same branches.

    The three numbers may still decide something (`Undecided`); then the setups are split.
    """

    setup: Setup
    """One of the setups."""
    places: npt.NDArray[np.intp]
    batch: Wholes
    rows: Wholes
    micro_batches: Wholes

    def split(self) -> Iterator[Alike]:
        """Yield parts with fewer different numbers: split by micro-batches; else by the remainder that a kernel pads; else by
        batch and rows."""
        if self.micro_batches.min() < self.micro_batches.max():
            yield from self._by(self.micro_batches)
        elif len({*(self.rows % ALIGNED_QUERIES).tolist()}) > 1:
            yield from self._by(self.rows % ALIGNED_QUERIES)
        else:
            yield from self._by(self.batch * (int(self.rows.max()) + 1) + self.rows)

    def _by(self, keys: Wholes) -> Iterator[Alike]:
        for own in same(keys):
            batch, rows, micro = self.batch[own], self.rows[own], self.micro_batches[own]
            numbers = {"micro_batch_size": int(batch[0]), "seq_len": int(rows[0]) * self.setup.sequence_parts}
            global_batch = self.setup.dp * int(batch[0]) * int(micro[0])
            setup = self.setup._replace(**numbers, global_batch_size=global_batch)
            yield Alike(setup, self.places[own], batch, rows, micro)


def same(keys: npt.NDArray[Any]) -> list[npt.NDArray[np.intp]]:
    """Return for each distinct key the places at which it occurs."""
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(np.diff(keys[order])) + 1
    return np.split(order, ends)


def answer(model: Model, alike: Alike, gpu: GPU | None, out: Columns) -> None:
    """Write the answers of these setups. Raise InputError if all of them are refused."""
    values = Values(alike.batch, alike.rows, alike.micro_batches)
    try:
        _answer(model, alike, values, gpu, out)
    except Undecided:
        for part in alike.split():
            answer(model, part, gpu, out)
    except TooLarge:
        _answer(model, alike, Values(*values.arrays, large=True), gpu, out)


def _answer(model: Model, alike: Alike, values: Values, gpu: GPU | None, out: Columns) -> None:
    setup, found = alike.setup, ranks(model, alike.setup)
    pads = any(profile.pads_queries for rank in found for profile in rank.profiles)
    if pads and len({*(alike.rows % ALIGNED_QUERIES).tolist()}) > 1:
        raise Undecided("a kernel pads queries")
    which, phases = _worst(found, values)
    for phase, size in phases.items():
        _write(out, phase, alike.places, size)
    out["rank"][alike.places] = np.array([rank.number for rank in found])[which]
    out["workspaces"][alike.places] = workspaces_of(gpu, kernels_of(setup, model)).total
    numbers = _with_numbers(setup, values.number(0), values.number(1), values.number(2))
    for place, rank in enumerate(found):
        own = np.flatnonzero(which == place)
        if len(own):
            part = values if len(own) == values.count else values.of(own)
            for name, result in _sent(rank.collectives(numbers), numbers, part, gpu):
                _write(out, name, alike.places[own], result)


def _with_numbers(setup: Setup, batch: Whole, rows: Whole, micro_batches: Whole) -> Setup:
    """Return the setup with these three numbers, any of which may be unknown."""
    numbers: dict[str, Any] = {"micro_batch_size": batch, "global_batch_size": setup.dp * batch * micro_batches}
    return setup._replace(seq_len=rows * setup.sequence_parts, **numbers)  # type: ignore[arg-type]


def _write(out: Columns, name: str, places: npt.NDArray[np.intp], result: Any) -> None:
    """Write numbers into a column. A number that needs more than 63 bits is 0 and is marked in "too large"."""
    column = out[name]
    if np.asarray(result).dtype.hasobject and column.dtype == np.int64:
        over = result > MOST
        out["too large"][places] |= over.astype(np.bool_)
        result = np.where(over, 0, result).astype(np.int64)
    column[places] = result


class _Found(NamedTuple):
    """One rank for each setup, as its index among all ranks, and the rank's peaks by phase."""

    which: npt.NDArray[np.intp]
    phases: dict[str, Numbers]

    @property
    def peak(self) -> Numbers:
        return np.maximum(np.maximum(self.phases["forward"], self.phases["backward"]), self.phases["step"])

    def or_else(self, other: _Found, better: Numbers) -> _Found:
        """Return the ranks of `other` for the setups in which it is `better`, these ranks for the others."""
        phases = {phase: np.where(better, other.phases[phase], size) for phase, size in self.phases.items()}
        return _Found(np.where(better, other.which, self.which), phases)


def _worst(found: list[Rank], values: Values) -> _Found:
    """Return the rank that is reported, for each setup, by the rule of `Report`: in each stage the rank with the highest peak,
    of equal peaks the rank with the highest in backward; of the stages the first with the highest peak."""
    stages: dict[int, _Found] = {}
    for place, rank in enumerate(found):
        phases = {phase: of.at(values) for phase, of in heights_of(rank, total(buffers_after_backward(rank))).items()}
        new = _Found(np.full(values.count, place), phases)
        before = stages.get(rank.number)
        if before is not None:
            more = (new.peak == before.peak) & (phases["backward"] > before.phases["backward"])
            new = before.or_else(new, (new.peak > before.peak) | more)
        stages[rank.number] = new
    worst, *others = stages.values()
    for other in others:
        worst = worst.or_else(other, other.peak > worst.peak)
    return worst


def _sent(
    collectives: Iterable[Collective], setup: Setup, values: Values, gpu: GPU | None
) -> Iterator[tuple[str, Any]]:
    """Yield the columns of payload, wire and seconds of each axis, by name."""
    sent = list(collectives)
    sums: dict[str, Any] = defaultdict(int)
    for one in sent:
        payload: Any = one.payload
        size = values.at(payload, 2 * max(one.group_size, len(sent)))
        wire = wire_bytes(one.collective, one.group_size, size)
        found = {"payload": size, "wire": wire}
        if gpu is not None:
            found["seconds"] = _seconds(one, setup, gpu, values.at(one.calls, 1), wire)
        for what, result in found.items():
            sums[f"{what} {one.axis}"] = sums[f"{what} {one.axis}"] + result
    yield from sums.items()


def _seconds(one: Collective, setup: Setup, gpu: GPU, calls: Any, wire: Any) -> Any:
    """Return the seconds of all calls of a collective; NaN if the time is not known."""
    path = path_of(one, setup, gpu)
    if isinstance(path, Unknown):
        return np.nan
    return seconds_of(one.collective, calls, wire, *path) if one.group_size > 1 else 0.0
