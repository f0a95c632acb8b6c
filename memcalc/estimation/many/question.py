"""`memcalc.many`: arrays of numbers, split into groups of setups that have the same polynomials."""

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
from memcalc.formats.given import with_files
from memcalc.inputs.model import Model, load_model
from memcalc.inputs.options import WHOLE, Options, check_options, option_name, refuse
from memcalc.setup.generation_checks import refuse_generation
from memcalc.setup.resolved import data_parallel_degree, resolve
from memcalc.tasks.tasked import tasked

if TYPE_CHECKING:
    import os

    from memcalc.inputs.gpu import GPU
    from memcalc.setup.setup import Setup

Wholes = npt.NDArray[np.int64]
NUMBERS: Final = ("micro_batch_size", "seq_len", "global_batch_size")
"""The options that the polynomials have as unknowns. Each value of another option has polynomials of its own."""


@dataclass(frozen=True)
class Many:
    """The estimates of many setups of one model. Each number is an array in the shape that the given arrays broadcast to.

    Nothing is known of a refused setup. Its bytes are more than any GPU has, so that no comparison takes it for one that fits:
    the most that 63 bits can count, and a fifth of that for each axis of collectives. Its seconds are NaN, its rank is -1.
    """

    phases: Mapping[str, Wholes]
    """The peak bytes of "forward", "backward" and "step" on the reported rank."""
    workspaces: Wholes
    """The bytes of the kernels' workspaces, which `allocated` has besides tensors."""
    rank: Wholes
    """The reported pipeline rank: the one with the highest peak."""
    payload: Mapping[str, Wholes]
    """The payload bytes of this rank's collectives in an optimizer step, by axis: "dp", "tp", "pp", "cp", "ep"."""
    wire: Mapping[str, Wholes]
    """The bytes that this rank sends for these collectives, by axis."""
    seconds: Mapping[str, npt.NDArray[np.float64]] | None
    """The seconds of these collectives one after the other, by axis; NaN where that is not known. None without a GPU."""
    refused: npt.NDArray[np.bool_]
    """True for the setups without an estimate; `line` says why."""
    model: Model = field(repr=False)
    given: Mapping[str, Any] = field(repr=False)
    """The options; arrays are in their common shape."""

    @property
    def peak(self) -> Wholes:
        """Return the peak bytes of a step on the worst rank."""
        return np.maximum.reduce([self.phases[phase] for phase in PHASES])

    @property
    def least_allocated(self) -> Wholes:
        """Return a lower bound of `allocated` in bytes: the peak and the workspaces.

        `allocated` also has the rounding of blocks to 512 bytes, and blocks that are not split. Both depend on every block of
        the run, which `memcalc.estimate` plays.
        """
        return self.peak + self.workspaces

    def options(self, *place: int) -> dict[str, Any]:
        """Return the options of the setup at a place of the arrays, as `memcalc.estimate` takes them."""
        return {
            name: int(value[place]) if isinstance(value, np.ndarray) else value for name, value in self.given.items()
        }

    def line(self, *place: int) -> str:
        """Return the line of the InputError with which `memcalc.estimate` refuses the setup at a place; '' if it is not
        refused."""
        if not self.refused[place]:
            return ""
        try:
            _ = estimate(self.model, **self.options(*place)).peak
        except InputError as error:
            return str(error)
        return "more bytes than 63 bits can count"


def many(model: str | os.PathLike[str] | Mapping[str, Any] | Model, **options: Any) -> Many:
    """Return what one training step needs, for arrays of numbers at once.

    Give `model` and `options` as for `memcalc.estimate`. Every option that is a whole number may be an array or a list; arrays
    are broadcast. Each setup has the numbers that `memcalc.estimate` gives for it. A refused setup is marked in `refused`.
    Raise InputError if no other numbers in the arrays could change what is wrong.
    """
    model, options, _ = with_files(model, options)
    loaded = load_model(model)
    loaded.check_step()
    arrays, scalars = _apart(options)
    fixed = check_options(scalars)
    refuse_generation(fixed, "arrays of options")
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
        _ask(tasked(loaded, fixed), check_options({**scalars, **own}), _Asked(flat, places), gpu, out)
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
    """Return the options that are arrays, and the others. Raise InputError for an array that does not have whole numbers."""
    arrays: dict[str, Wholes] = {}
    scalars: dict[str, Any] = {}
    for name, value in options.items():
        if not isinstance(value, (np.ndarray, np.integer, Sequence)) or isinstance(value, (str, bytes)):
            scalars[name] = value
            continue
        if name not in WHOLE:
            check_options({name: None})  # raises if there is no such option
            refuse(name, cast(object, value), "allowed: one value; arrays are for options that are whole numbers")
        arrays[name] = _array(name, cast(object, value))
    shapes = {array.shape for array in arrays.values()}
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        named = ", ".join(f"{option_name(name)} {array.shape}" for name, array in arrays.items())
        raise InputError(f"{named}: arrays of these shapes cannot be combined") from None
    return arrays, scalars


def _array(name: str, value: object) -> Wholes:
    """Return an option's array. Raise InputError if its values are not whole numbers."""
    try:
        array: npt.NDArray[Any] = np.asarray(value)
    except ValueError:
        refuse(name, value, "rows have different lengths; allowed: an array of whole numbers")
    if array.size and (array.dtype.kind not in "iu" or array.max() >= 1 << 63):
        refuse(name, value, "allowed: an array of whole numbers")
    return array.astype(np.int64)


def _frames(
    flat: Mapping[str, Wholes], places: npt.NDArray[np.intp]
) -> Iterator[tuple[npt.NDArray[np.intp], dict[str, int]]]:
    """Group the setups by the array options that the polynomials do not have as unknowns. Yield each group's places and the
    values of these options."""
    names = [name for name in flat if name not in NUMBERS]
    groups = [places] if len(places) else []
    for name in names:
        groups = [group[own] for group in groups for own in same(flat[name][group])]
    for group in groups:
        yield group, {name: int(flat[name][group[0]]) for name in names}


class _Asked(NamedTuple):
    """The array options of some setups, by place."""

    flat: Mapping[str, Wholes]
    places: npt.NDArray[np.intp]

    def number(self, name: str, default: int) -> Wholes:
        array = self.flat.get(name)
        return np.full(len(self.places), default) if array is None else array[self.places]


def _ask(model: Model, options: Options, asked: _Asked, gpu: GPU | None, out: Columns) -> None:
    """Write the answers of setups that differ only in the unknowns of the polynomials."""
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
    """Setups that differ only in batch, seq and micro_batches; `seq` is 0 for the default."""

    model: Model
    options: Options
    dp: int
    places: npt.NDArray[np.intp]
    batch: Wholes
    seq: Wholes
    micro_batches: Wholes

    def setup(self, place: int, micro_batches: int | None = None) -> Setup | None:
        """Return the setup at a place, with `micro_batches` if given; None if it is refused."""
        micro = int(self.micro_batches[place]) if micro_batches is None else micro_batches
        found = self._resolved(int(self.batch[place]), int(self.seq[place]), micro)
        return None if isinstance(found, str) else found

    def _resolved(self, batch: int, seq: int, micro_batches: int) -> Setup | str:
        """Return the setup with these numbers, or the line with which it is refused."""
        step = self.dp * batch * micro_batches
        numbers = {"micro_batch_size": batch, "seq_len": seq or None, "global_batch_size": step}
        try:
            return resolve(self.options._replace(**numbers), self.model)
        except InputError as error:
            return str(error)

    def _all_refused(self) -> bool:
        """Return True if every setup is refused for the same reason.

        A line about a number names the number. So if the smallest and the largest numbers get the same line, the reason is
        something else, or all setups have the same numbers.
        """
        arrays = self.batch, self.seq, self.micro_batches
        one = self._resolved(*(int(array.min()) for array in arrays))
        return isinstance(one, str) and one == self._resolved(*(int(array.max()) for array in arrays))

    def ask(self, gpu: GPU | None, out: Columns) -> npt.NDArray[np.bool_]:
        """Write the answers. Return an array that is True for refused setups."""
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
        """Return a setup that is not refused, and the place that has its batch and seq; None if all setups are refused."""
        numbers = [own[0] for own in same(self.micro_batches)]
        for own in same(self._sizes()):
            for other in numbers:
                found = self.setup(int(own[0]), int(self.micro_batches[other]))
                if found is not None:
                    return int(own[0]), found
        return None

    def _sizes(self) -> Wholes:
        """Return a key for each pair of batch and seq."""
        return self.batch * (int(self.seq.max()) + 1) + self.seq

    def _branches(self, branches: Branches, good: int) -> Iterator[npt.NDArray[np.intp]]:
        """Yield groups of setups that take the same branches, without those that are refused with `good` micro-batches."""
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
        """Write the answers of setups that take the same branches. Return False if they are refused."""
        setup = self.setup(int(own[0]))
        assert setup is not None
        seq = np.where(self.seq[own] == 0, setup.seq_len or 1, self.seq[own])
        alike = Alike(setup, self.places[own], self.batch[own], seq // setup.sequence_parts, self.micro_batches[own])
        try:
            answer(self.model, alike, gpu, out)
        except InputError:
            return False
        return True
