"""The lines of a comparison: what differs between the setups, then each number, with the best of a line marked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.rows import COMPONENTS
from memcalc.errors import one_line
from memcalc.inputs.file_options import FILES
from memcalc.timing.kernels import Unknown
from memcalc.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from memcalc.decisions.compare import Column, Compared
    from memcalc.decisions.cost import Cost
    from memcalc.estimation.report import Report
    from memcalc.timing.step import StepTime

NOTHING: Final = "-"
BEST: Final = "*"
REFUSED: Final = "refused"
PEAK: Final = "peak"
ANSWERS: Final = {
    "fits": "fits",
    "tight": "fits, tight",
    "expandable": "expandable only",
    "uncertain": "may not fit",
    "no": "does not fit",
    "unknown": "not known",
}
"""The verdict's answers in a table's cell."""
_RESOLVED: Final = (
    "engine", "zero", "dp", "micro_batch_size", "seq_len", "global_batch_size", "precision", "optimizer",
    "optimizer_implementation", "kernels", "attention", "cross_entropy",
)  # fmt: skip
"""The resolved options that are shown although nobody gave them."""


class Line(NamedTuple):
    """A label and a cell for each column; `best` are the numbers of the best columns."""

    label: str
    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()


class Measure(NamedTuple):
    """A number of each column, and which of several is the best."""

    label: str
    of: Callable[[Column], float | None]
    shown: Callable[[Any], str]
    best: Callable[..., Any] | None = min
    if_fits: bool = False
    """True if a column that does not fit its GPU is never the best: no step of it ends."""


def head_lines(compared: Compared) -> list[Line]:
    """Return a line for each varied option, and for each resolved option that follows from them."""
    varied = [Line(_label(name), _cells(compared, name)) for name in compared.varied]
    settings = _settings(compared)
    return varied + [
        Line(_label(name), tuple(NOTHING if value is None else shown(value) for value in settings[name]))
        for name in _RESOLVED
        if name not in compared.varied and _differ(settings[name])
    ]


def shared_settings(compared: Compared) -> list[str]:
    """Return the model and the options that all setups have, each in words."""
    model = compared.fixed.get("model")
    parts = [] if model is None else [str(model.name)]
    if "params" in compared.fixed:
        parts.append(f"{shown(compared.fixed['params'])} parameters, model states only")
    parts += [f"{_label(name)} {one_line(value)}" for name, value in compared.fixed.items() if name in FILES]
    given = [name for name in compared.fixed if name not in ("model", "params", *FILES)]
    settings = _settings(compared)
    for name in dict.fromkeys((*given, *_RESOLVED)):
        values = [value for value in settings[name] if value is not None]
        if name not in compared.varied and values and not _differ(settings[name]):
            parts.append(f"{_label(name)} {shown(values[0])}")
    return parts


def value_lines(compared: Compared) -> list[Line]:
    """Return a line for each number that is known of a column."""
    columns = compared.columns
    lines = [_line(measure, columns) for measure in _memory(columns)]
    phases = tuple(NOTHING if column.report is None else column.report.peak_phase for column in columns)
    lines.insert([line.label for line in lines].index(PEAK) + 1, Line("peak in", phases))
    if any(column.report is not None and column.report.gpu is not None for column in columns):
        lines += [Line("verdict", tuple(map(_verdict, columns))), _line(_SPARE, columns)]
    elif any(column.report is None for column in columns):
        lines.append(Line("verdict", tuple(REFUSED if column.report is None else NOTHING for column in columns)))
    lines += [_line(measure, columns) for measure in (*_SENT, *_TIMES)]
    lines.insert(len(lines) - 2, Line("range", tuple(map(_range, columns))))
    if any(column.cost is not None for column in columns):
        lines += [_line(measure, columns) for measure in _COSTS]
    return [line for line in lines if any(cell != NOTHING for cell in line.cells)]


def refusals(compared: Compared) -> list[str]:
    """Return a line for each refused setup."""
    return [f"{REFUSED}: {heading(column)}: {column.error}" for column in compared.columns if column.error]


def unknown_times(compared: Compared) -> list[str]:
    """Return a line for each setup with a GPU whose time is not known, with the reason."""
    return [
        f"time not known: {heading(column)}: {column.report.time.missing}"
        for column in compared.columns
        if column.report is not None
        and column.report.gpu is not None
        and not column.report.states_only
        and isinstance(column.report.time, Unknown)
    ]


def heading(column: Column) -> str:
    """Return the varied options of a column in words."""
    return " · ".join(f"{_label(name)} {shown(value)}" for name, value in column.values.items())


def shown(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def time_of(column: Column) -> StepTime | None:
    """Return the time of a column's step; None if it is not known."""
    report = column.report
    if report is None or report.gpu is None or isinstance(report.time, Unknown):
        return None
    return report.time


def at_peak(report: Report) -> Mapping[str, int]:
    """Return the bytes of each component at the peak."""
    sizes: dict[str, int] = dict.fromkeys(COMPONENTS, 0)
    for item in report.items:
        sizes[item.component] += item.at_peak
    return sizes


def _label(name: str) -> str:
    return name.replace("_", "-")


def _cells(compared: Compared, name: str) -> tuple[str, ...]:
    return tuple(shown(column.values[name]) for column in compared.columns)


def _settings(compared: Compared) -> Mapping[str, list[Any]]:
    """Return the resolved values of each option by name; None for a refused setup."""
    setups = [None if column.report is None else column.report.setup for column in compared.columns]
    fields = next(setup._fields for setup in setups if setup is not None)
    return {name: [None if setup is None else getattr(setup, name) for setup in setups] for name in fields}


def _differ(values: Sequence[Any]) -> bool:
    return len({value for value in values if value is not None}) > 1


def _line(measure: Measure, columns: Sequence[Column]) -> Line:
    values = [measure.of(column) for column in columns]
    cells = tuple(NOTHING if value is None else measure.shown(value) for value in values)
    running = [
        value
        for value, column in zip(values, columns, strict=True)
        if value is not None and not (measure.if_fits and column.report is not None and column.report.fits is False)
    ]
    if measure.best is None or not running or len({value for value in values if value is not None}) < 2:
        return Line(measure.label, cells)
    best = measure.best(running)
    return Line(measure.label, cells, frozenset(i for i, value in enumerate(values) if value == best))


def _of_report(read: Callable[[Report], float | None]) -> Callable[[Column], float | None]:
    return lambda column: None if column.report is None else read(column.report)


def _of_time(read: Callable[[StepTime, Report], float | None]) -> Callable[[Column], float | None]:
    def of(column: Column) -> float | None:
        time = time_of(column)
        return None if time is None or column.report is None else read(time, column.report)

    return of


def _of_cost(read: Callable[[Cost], float | None]) -> Callable[[Column], float | None]:
    return lambda column: None if column.cost is None else read(column.cost)


def _memory(columns: Sequence[Column]) -> list[Measure]:
    """Return the components that a column has at its peak, then the totals. Peaks are at different moments, so no column's
    component is better than another's: with fewer activations at its peak, a setup may need more of them before."""
    sizes: dict[int, Mapping[str, int]] = {
        id(column): {} if column.report is None else at_peak(column.report) for column in columns
    }

    def component(name: str) -> Measure:
        def of(column: Column) -> int | None:
            return sizes[id(column)].get(name)

        return Measure(name.replace("_", " "), of, show_bytes, best=None)

    used = [name for name in COMPONENTS if any(size.get(name) for size in sizes.values())]
    return [*map(component, used), *_TOTALS]


def _sent(name: str, report: Report) -> int | None:
    """Return the payload or wire bytes of a step; None for a bare number of parameters, whose collectives are not known."""
    return None if report.states_only else sum(getattr(collective, name) for collective in report.collectives)


def _tokens_per_gpu(time: StepTime, report: Report) -> float | None:
    return time.tokens_per_second / report.setup.gpus if report.model.program.has_sequence else None


_TOTALS: Final = (
    Measure(PEAK, _of_report(lambda report: report.peak), show_bytes),
    Measure("allocated", _of_report(lambda report: report.allocated), show_bytes),
    Measure("device", _of_report(lambda report: report.device), show_bytes),
)
_SPARE: Final = Measure("to spare", _of_report(lambda report: report.headroom), show_bytes, max)
_SENT: Final = tuple(Measure(name, _of_report(partial(_sent, name)), show_bytes) for name in ("payload", "wire"))
_TIMES: Final = (
    Measure("time of a step", _of_time(lambda time, _: time.seconds), show_seconds, min, if_fits=True),
    Measure(
        "tokens/s per GPU",
        _of_time(_tokens_per_gpu),
        "{:,.0f}".format,
        max,
        if_fits=True,
    ),
    Measure("MFU", _of_time(lambda time, _: time.mfu), "{:.1%}".format, max, if_fits=True),
)
_COSTS: Final = (
    Measure("cost of a step", _of_cost(lambda cost: cost.per_step), "{:,.4g}".format, min, if_fits=True),
    Measure("cost of 10^9 tokens", _of_cost(lambda cost: cost.per_billion_tokens), "{:,.2f}".format, min, if_fits=True),
)


def _verdict(column: Column) -> str:
    if column.report is None:
        return REFUSED
    verdict = column.report.verdict
    return NOTHING if verdict is None else ANSWERS[verdict.answer]


def _range(column: Column) -> str:
    time = time_of(column)
    return NOTHING if time is None else f"{show_seconds(time.low)}..{show_seconds(time.high)}"
