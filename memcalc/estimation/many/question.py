"""`memcalc.many`: arrays of numbers, in groups of setups that have the same polynomials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from memcalc.engines.branches import Branches, branches_of
from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.estimation.many.answers import AXES, Alike, Columns, answer, columns, same
from memcalc.estimation.many.polynomials import MOST
from memcalc.estimation.report import PHASES
from memcalc.inputs.model import Model, load_model
from memcalc.inputs.options import WHOLE, Options, check_options, option_name, refuse
from memcalc.setup.setup import data_parallel_degree, resolve

if TYPE_CHECKING:
    import os

    from memcalc.inputs.gpu import GPU
    from memcalc.setup.setup import Setup

Wholes = npt.NDArray[np.int64]
NUMBERS: Final = ("micro_batch_size", "seq_len", "global_batch_size")
"""The options that polynomials are in; what others decide is made for each of their values."""


@dataclass(frozen=True)
class Many:
    """The estimates of many setups of one model, each number an array of the shape that the given arrays have together.

    Of a setup that is refused nothing is known. It has bytes that no GPU has, so that no comparison takes it for one that fits:
    the most that 63 bits can count, of collectives a fifth for each axis. Its seconds are not a number, its rank is -1.
    """

    phases: Mapping[str, Wholes]
    """Bytes at the peak of "forward", "backward" and "step", of the rank that is reported."""
    workspaces: Wholes
    """Bytes of the kernels' workspaces, which `allocated` has besides tensors."""
    rank: Wholes
    """The pipeline rank that is reported: the one with the highest peak."""
    payload: Mapping[str, Wholes]
    """Bytes that this rank's collectives are called on in an optimizer step, by axis: "dp", "tp", "pp", "cp", "ep"."""
    wire: Mapping[str, Wholes]
    """Bytes that it sends for them."""
    seconds: Mapping[str, npt.NDArray[np.float64]] | None
    """What they take, one after the other; not a number where that is not known. None without a GPU."""
    refused: npt.NDArray[np.bool_]
    """Which setups there is no estimate of; `line` says why."""
    model: Model = field(repr=False)
    given: Mapping[str, Any] = field(repr=False)
    """The options, arrays in their common shape."""

    @property
    def peak(self) -> Wholes:
        """Bytes of the worst rank at the highest moment of a step."""
        return np.maximum.reduce([self.phases[phase] for phase in PHASES])

    @property
    def least_allocated(self) -> Wholes:
        """Bytes that `allocated` is not below: the peak and the workspaces. What it has besides, blocks that are rounded up to
        512 bytes and such as are not split, depends on every block of the run: `memcalc.estimate` plays it."""
        return self.peak + self.workspaces

    def options(self, *place: int) -> dict[str, Any]:
        """The options of one setup, as `memcalc.estimate` takes them."""
        return {
            name: int(value[place]) if isinstance(value, np.ndarray) else value for name, value in self.given.items()
        }

    def line(self, *place: int) -> str:
        """Why a setup is refused: the line that `memcalc.estimate` gives; '' where it is not."""
        if not self.refused[place]:
            return ""
        try:
            _ = estimate(self.model, **self.options(*place)).peak
        except InputError as error:
            return str(error)
        return "more bytes than 63 bits can count"


def many(model: str | os.PathLike[str] | Mapping[str, Any] | Model, **options: Any) -> Many:
    """Return what one training step needs, for arrays of numbers at once.

    `model` and `options` as for `memcalc.estimate`. Every option that is a whole number may be an array or a list; they are
    broadcast. Of each setup the numbers are those that `memcalc.estimate` has. A setup that is refused is marked; InputError
    if no array could change what is wrong.
    """
    loaded = load_model(model)
    loaded.check_step()
    arrays, scalars = _apart(options)
    fixed = check_options(scalars)
    gpu = None
    if fixed.gpu is not None:
        from memcalc.inputs.gpu import load_gpu

        gpu = load_gpu(fixed.gpu)
    shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
    whole = {name: np.broadcast_to(array, shape) for name, array in arrays.items()}
    flat = {name: np.ascontiguousarray(array).reshape(-1) for name, array in whole.items()}
    count = int(np.prod(shape))
    out = columns(count, gpu)
    allowed = np.ones(count, np.bool_)
    for name, array in flat.items():
        low, high = WHOLE[name]
        allowed &= (low <= array) & (array <= high)
    out["refused"] |= ~allowed
    for places, own in _frames(flat, np.flatnonzero(allowed)):
        _ask(loaded, check_options({**scalars, **own}), _Asked(flat, places), gpu, out)
    out["refused"] |= out["too large"]
    return _many(loaded, {**scalars, **whole}, out, shape)


def _many(model: Model, given: Mapping[str, Any], out: Columns, shape: tuple[int, ...]) -> Many:
    def made(name: str, otherwise: float) -> Any:
        return np.where(out["refused"], otherwise, out[name]).reshape(shape)

    def by_axis(what: str, otherwise: float) -> dict[str, Any]:
        return {axis: made(f"{what} {axis}", otherwise) for axis in AXES}

    phases, refused = {phase: made(phase, MOST) for phase in PHASES}, out["refused"].reshape(shape)
    payload, wire = (by_axis(what, MOST // len(AXES)) for what in ("payload", "wire"))
    seconds = by_axis("seconds", np.nan) if f"seconds {AXES[0]}" in out else None
    return Many(phases, made("workspaces", 0), made("rank", -1), payload, wire, seconds, refused, model, given)


def _apart(options: Mapping[str, Any]) -> tuple[dict[str, Wholes], dict[str, Any]]:
    """The arrays among the options, and the others. InputError for an array that is none of whole numbers."""
    arrays: dict[str, Wholes] = {}
    scalars: dict[str, Any] = {}
    for name, value in options.items():
        if not isinstance(value, (np.ndarray, np.integer, Sequence)) or isinstance(value, (str, bytes)):
            scalars[name] = value
            continue
        if name not in WHOLE:
            check_options({name: None})  # it may be unknown
            refuse(name, cast(object, value), "allowed: one value; arrays are for options that are whole numbers")
        arrays[name] = _array(name, cast(object, value))
    shapes = {array.shape for array in arrays.values()}
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        named = ", ".join(f"{option_name(name)} {array.shape}" for name, array in arrays.items())
        raise InputError(f"{named}: arrays of these shapes do not go together") from None
    return arrays, scalars


def _array(name: str, value: object) -> Wholes:
    """The numbers of an option. InputError if they are none."""
    try:
        array: npt.NDArray[Any] = np.asarray(value)
    except ValueError:
        refuse(name, value, "rows of several lengths; allowed: an array of whole numbers")
    if array.size and (array.dtype.kind not in "iu" or array.max() >= 1 << 63):
        refuse(name, value, "allowed: an array of whole numbers")
    return array.astype(np.int64)


def _frames(
    flat: Mapping[str, Wholes], places: npt.NDArray[np.intp]
) -> Iterator[tuple[npt.NDArray[np.intp], dict[str, int]]]:
    """The setups by what is no number of a polynomial: their places, and these options."""
    names = [name for name in flat if name not in NUMBERS]
    groups = [places] if len(places) else []
    for name in names:
        groups = [group[own] for group in groups for own in same(flat[name][group])]
    for group in groups:
        yield group, {name: int(flat[name][group[0]]) for name in names}


class _Asked(NamedTuple):
    """The numbers of some setups."""

    flat: Mapping[str, Wholes]
    places: npt.NDArray[np.intp]

    def number(self, name: str, default: int) -> Wholes:
        array = self.flat.get(name)
        return np.full(len(self.places), default) if array is None else array[self.places]


def _ask(model: Model, options: Options, asked: _Asked, gpu: GPU | None, out: Columns) -> None:
    """Write the answers of setups that differ in the numbers of polynomials alone."""
    places = asked.places
    try:
        dp = data_parallel_degree(options)
    except InputError:
        out["refused"][places] = True
        return
    batch = asked.number("micro_batch_size", options.micro_batch_size)
    seq = asked.number("seq_len", options.seq_len or 0)
    step = asked.number("global_batch_size", options.global_batch_size or 0)
    unit = dp * batch
    step = np.where(step == 0, unit, step)
    divides = step % unit == 0
    out["refused"][places[~divides]] = True
    own = np.flatnonzero(divides)
    if not len(own):
        return
    question = _Question(model, options, dp, places[own], batch[own], seq[own], step[own] // unit[own])
    refused = question.ask(gpu, out)
    out["refused"][question.places[refused]] = True


class _Question(NamedTuple):
    """Setups that differ in numbers alone; `seq` is 0 for the default."""

    model: Model
    options: Options
    dp: int
    places: npt.NDArray[np.intp]
    batch: Wholes
    seq: Wholes
    micro_batches: Wholes

    def setup(self, place: int, micro_batches: int | None = None) -> Setup | None:
        """One of them; None where it is refused."""
        micro = int(self.micro_batches[place]) if micro_batches is None else micro_batches
        found = self._resolved(int(self.batch[place]), int(self.seq[place]), micro)
        return None if isinstance(found, str) else found

    def _resolved(self, batch: int, seq: int, micro_batches: int) -> Setup | str:
        """The setup with these numbers, or the line of its refusal."""
        step = self.dp * batch * micro_batches
        numbers = {"micro_batch_size": batch, "seq_len": seq or None, "global_batch_size": step}
        try:
            return resolve(self.options._replace(**numbers), self.model)
        except InputError as error:
            return str(error)

    def _all_refused(self) -> bool:
        """Tell whether they are refused for something else than a number: a line that is about one names it, and so is another
        where all numbers are."""
        arrays = self.batch, self.seq, self.micro_batches
        one = self._resolved(*(int(array.min()) for array in arrays))
        return isinstance(one, str) and one == self._resolved(*(int(array.max()) for array in arrays))

    def ask(self, gpu: GPU | None, out: Columns) -> npt.NDArray[np.bool_]:
        """Write the answers; which setups are refused."""
        refused = np.ones(len(self.places), np.bool_)
        found = None if self._all_refused() else self._probe()
        if found is None:
            return refused
        place, probe = found
        branches = branches_of(self.model, probe)
        steps: dict[Any, list[npt.NDArray[np.intp]]] = {}
        for own in same(self.micro_batches):
            micro_batches = int(self.micro_batches[own[0]])
            if self.setup(place, micro_batches) is not None:
                steps.setdefault(branches.steps(micro_batches), []).append(own)
        kind = np.full(len(self.places), -1)
        for number, groups in enumerate(steps.values()):
            kind[np.concatenate(groups)] = number
        for alike in self._branches(branches, probe.micro_batches):
            for part in same(kind[alike]):
                own = alike[part]
                refused[own] = kind[own[0]] < 0 or not self._answer(own, gpu, out)
        return refused

    def _probe(self) -> tuple[int, Setup] | None:
        """A setup that is not refused, and whose micro-batch and sequence it has; None if all are."""
        numbers = [own[0] for own in same(self.micro_batches)]
        for own in same(self._sizes()):
            for other in numbers:
                found = self.setup(int(own[0]), int(self.micro_batches[other]))
                if found is not None:
                    return int(own[0]), found
        return None

    def _sizes(self) -> Wholes:
        """Micro-batch and sequence in one number."""
        return self.batch * (int(self.seq.max()) + 1) + self.seq

    def _branches(self, branches: Branches, good: int) -> Iterator[npt.NDArray[np.intp]]:
        """The setups that go the same way, of those that are not refused with a `good` number of micro-batches."""
        found: dict[Any, list[npt.NDArray[np.intp]]] = {}
        resolved: dict[tuple[int, int], Setup | None] = {}
        for own in same(self._sizes()):
            batch, seq = int(self.batch[own[0]]), int(self.seq[own[0]])
            key = batch % branches.unit, seq
            if key not in resolved:
                resolved[key] = self.setup(int(own[0]), good)
            setup = resolved[key]
            if setup is not None:
                found.setdefault(branches.of(setup._replace(micro_batch_size=batch)), []).append(own)
        yield from map(np.concatenate, found.values())

    def _answer(self, own: npt.NDArray[np.intp], gpu: GPU | None, out: Columns) -> bool:
        """Write the answers of setups that go the same way; whether they are not refused."""
        setup = self.setup(int(own[0]))
        assert setup is not None
        seq = np.where(self.seq[own] == 0, setup.seq_len or 1, self.seq[own])
        alike = Alike(setup, self.places[own], self.batch[own], seq // setup.sequence_parts, self.micro_batches[own])
        try:
            answer(self.model, alike, gpu, out)
        except InputError:
            return False
        return True
