"""The advice of a report, for the JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def advice_document(report: Report) -> list[Any]:
    """An object for each change that would help, best first, with the names that `memcalc.report.advice` gives its fields."""
    from memcalc.report.advice import advice

    return [_plain(change) for change in advice(report)]


def _plain(value: Any) -> Any:
    """Named tuples as objects, other sequences as lists, whatever is in them alike."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in cast("list[Any]", value)]
    return value
