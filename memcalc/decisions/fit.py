"""`memcalc fit`: the largest or smallest value of a quantity with which a step fits a GPU.

Bisection over the estimate finds a boundary: a value that fits, and the next one, which does not. Not every quantity is
monotone: the allocator's fragmentation, blocks of kernels and ZeRO's thresholds can leave a gap. So some values beyond the
boundary are tried too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.collector import without_collections
from memcalc.decisions.boundary import beyond, last_enough
from memcalc.decisions.quantities import MOST_GPUS, QUANTITIES, Asked, Quantity
from memcalc.device.verdict import outside
from memcalc.errors import InputError, one_line
from memcalc.estimation.estimate import estimate
from memcalc.formats.given import with_files
from memcalc.inputs.model import Model, load_model
from memcalc.report.advice_document import advice_document
from memcalc.report.document import (
    SCHEMA_VERSION,
    fit_document,
    item_document,
    memory_document,
    model_document,
    setup_document,
)

if TYPE_CHECKING:
    from memcalc.core.rows import Item
    from memcalc.estimation.report import Report


class Growth(NamedTuple):
    """A row of a step that does not fit, and how many bytes it has more than in the step before."""

    item: Item
    nbytes: int
    grows_by: int


class Next(NamedTuple):
    """The first value that does not fit, and what stops it."""

    value: int
    report: Report
    row: Growth

    @property
    def over_by(self) -> int:
        """Return the bytes that are missing; 0 if the run needs no more than the GPU has, but for the stated error."""
        return max(0, -(self.report.headroom or 0)) if self.report.verdict is not None else 0


@dataclass(frozen=True)
class Fit:
    """The answer: the value, its estimate, and what stops the next one."""

    solve: str
    smallest: bool
    value: int | None
    """None if nothing fits."""
    report: Report
    """The estimate of the value; if nothing fits, of the tried value with the lowest peak."""
    next: Next | None
    """None if something else than memory is the limit."""
    limit: str | None
    """The limit in words if it is not memory."""
    tried: tuple[int, ...]
    """The values beyond `next` that were tried."""
    also_fits: tuple[int, ...]
    """The values among `tried` that fit, after a gap."""

    @without_collections()
    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "schema_version": SCHEMA_VERSION,
            "solve": self.solve,
            "value": self.value,
            "model": model_document(self.report),
            "setup": setup_document(self.report),
            "memory": memory_document(self.report),
            "fit": fit_document(self.report),
            "next": None if self.next is None else _next_document(self.next),
            "limit": self.limit,
            "tried": list(self.tried),
            "also_fits": list(self.also_fits),
            "advice": advice_document(self.report) if self.value is None else [],
        }


def _next_document(one: Next) -> dict[str, Any]:
    assert one.report.verdict is not None
    row = item_document(one.row.item) | {"grows_by": one.row.grows_by}
    return {"value": one.value, "over_by": one.over_by, "answer": one.report.verdict.answer, "row": row}


@without_collections()
def _refuse_uncounted(model: Model) -> None:
    """Raise InputError for a model of which a part is not counted: no value could be shown to fit."""
    if model.program.uncounted:
        why = f"{model.program.uncounted} is not known, so no value can be shown to fit"
        raise InputError(f"--layers: {why}; allowed: `cudnn: false` in the file, where cuDNN is off")


def fit(
    solve: str | None,
    model: Any = None,
    *,
    params: int | str | None = None,
    max_gpus: int = MOST_GPUS,
    **options: Any,
) -> Fit:
    """Return the largest value of the quantity `solve` (for gpus, the smallest) with which the setup fits its GPU.

    Give `model`, `params` and `options` as for `memcalc.estimate`. `max_gpus` is the most GPUs that are tried. Raise InputError
    with one line that says what is wrong.
    """
    find = _quantity(solve)
    model, options, files = with_files(model, options)
    if files is not None:
        options = {
            name: value for name, value in options.items() if name not in _moved_by(solve) or name not in files.origins
        }
    states_only = find is QUANTITIES["params"]
    if options.get("gpu") is None:
        raise InputError("--gpu: missing; fit needs the GPU that the setup has to fit, as in: --gpu a100-80gb")
    if states_only and params is not None:
        raise InputError(f"--params {one_line(params)}: is what --solve params searches for; allowed: leave it out")
    if not states_only and (model is None) == (params is None):
        raise InputError(f"--model or --params: exactly one of them is needed; as in: {EXAMPLE}")
    loaded = None if model is None else load_model(model)
    if loaded is not None:
        _refuse_uncounted(loaded)
    given = {name: value for name, value in options.items() if value is not None}
    return _Solving(find(Asked(loaded, params, given, max_gpus))).answer()


def _moved_by(solve: str | None) -> tuple[str, ...]:
    """Return the options of a file that the search moves, and so does not keep: a batch is of a micro-batch and of GPUs."""
    own = (solve or "").replace("-", "_")
    return (own, "global_batch_size") if own in ("micro_batch_size", "gpus") else (own,)


EXAMPLE: Final = "memcalc fit llama-7b --solve micro-batch-size --gpus 8 --zero 3 --gpu a100-80gb"


def _quantity(solve: str | None) -> Any:
    """Return the function of a quantity's name. Raise InputError for a name that is none."""
    allowed = ", ".join(QUANTITIES)
    solve = solve and solve.replace("_", "-")
    if solve is None:
        raise InputError(f"--solve: missing; allowed: {allowed}; as in: {EXAMPLE}")
    if solve not in QUANTITIES:
        raise InputError(f"--solve {one_line(solve)}: allowed: {allowed}")
    return QUANTITIES[solve]


class _Solving:
    """The search for one quantity. It keeps the estimate of each value that was tried."""

    def __init__(self, quantity: Quantity) -> None:
        self.quantity = quantity
        self.count = len(quantity.values)
        self.estimated: dict[int, Report | str] = {}
        """The estimates by value, or the line of a refused one."""

    def answer(self) -> Fit:
        quantity, values = self.quantity, self.quantity.values
        place = last_enough(self.count, self._is_possible, self._fits)
        report = None if place is None else self._report(place)
        if place is None or report is None or isinstance(report, str):
            return self._nothing()
        found = Fit(quantity.name, quantity.smallest, values[place], report, None, None, (), ())
        if place + 1 == self.count:
            return replace(found, limit=quantity.end)
        following = self._report(place + 1)
        tried = self._tried(place)
        found = replace(
            found, tried=tuple(tried), also_fits=tuple(value for value, one in tried.items() if suffices(one))
        )
        if isinstance(following, str):
            return replace(found, limit=f"{quantity.name} {values[place + 1]} is refused: {following}")
        return replace(found, next=Next(values[place + 1], following, _grown(report, following)))

    def _is_possible(self, place: int) -> bool:
        report = self._report(place)
        return not isinstance(report, str) and not _is_above(report)

    def _fits(self, place: int) -> bool:
        report = self._report(place)
        return not isinstance(report, str) and suffices(report)

    def _tried(self, place: int) -> dict[int, Report]:
        """Return the estimates of values beyond the next one, by value. Some are new, up to one whose peak is too high."""
        for other in beyond(place, self.count):
            if not self._is_possible(other):
                break
        next_value, smallest = self.quantity.values[place + 1], self.quantity.smallest
        return {
            value: report
            for value, report in sorted(self.estimated.items())
            if (value < next_value if smallest else value > next_value) and not isinstance(report, str)
        }

    def _nothing(self) -> Fit:
        """Return the answer that nothing fits, with the tried value that has the lowest peak. Raise InputError if every value is
        refused."""
        reports = {value: report for value, report in sorted(self.estimated.items()) if not isinstance(report, str)}
        if not reports:
            raise InputError(next(str(line) for line in self.estimated.values()))
        value = min(reports, key=lambda value: reports[value].peak)
        stops = Next(value, reports[value], _largest(reports[value]))
        return Fit(self.quantity.name, self.quantity.smallest, None, reports[value], stops, None, tuple(reports), ())

    def _report(self, place: int) -> Report | str:
        value = self.quantity.values[place]
        if value not in self.estimated:
            try:
                case = self.quantity.case(value)
                self.estimated[value] = estimate(case.model, params=case.params, **case.options)
            except InputError as error:
                self.estimated[value] = str(error)
        return self.estimated[value]


def suffices(report: Report) -> bool:
    """Return True if the full verdict is a fit; for a bare number of parameters, if the states do not exclude it.

    The peak alone, then one play of the run, decide most cases as the full verdict does.
    """
    if _is_above(report):
        return False
    look = report.first_look
    if look is None or look.answer in ("no", "uncertain"):
        return False
    return report.fits is True or (report.fits is None and report.states_only)


def _is_above(report: Report) -> bool:
    """Return True if the tensors at the peak, with what a process holds outside torch, are more than the GPU has."""
    return report.gpu is not None and report.peak + outside(report) > report.gpu.capacity


def _rows(report: Report) -> Mapping[tuple[str, str], tuple[Item, int]]:
    """Return every row at the peak, and what the allocator and the device add, by component and name, with its bytes."""
    rows = [(item, item.at_peak) for item in report.items] + [(item, item.nbytes) for item in report.overheads]
    out: dict[tuple[str, str], tuple[Item, int]] = {}
    for item, nbytes in rows:
        key = item.component, item.name
        out[key] = item, nbytes + (out[key][1] if key in out else 0)
    return out


def _grown(before: Report, after: Report) -> Growth:
    """Return the row that grows most from one step to the next, of the rank that decides in each."""
    then, now = _rows(_deciding(before)), _rows(_deciding(after))
    grown = [Growth(item, nbytes, nbytes - (then[key][1] if key in then else 0)) for key, (item, nbytes) in now.items()]
    return max(grown, key=lambda row: row.grows_by)


def _largest(report: Report) -> Growth:
    """Return the largest row of tensors at the peak."""
    return max((Growth(item, item.at_peak, 0) for item in _deciding(report).items), key=lambda row: row.nbytes)


def _deciding(report: Report) -> Report:
    return report if report.verdict is None else report.verdict.report
