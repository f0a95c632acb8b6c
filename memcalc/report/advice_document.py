"""The advice of a report, for the JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def advice_document(report: Report) -> list[Any]:
    """Return an object for each proposal, the best first. Its keys are the fields of `memcalc.report.advice.Proposal`."""
    from memcalc.report.advice import advice

    return [_plain(change) for change in advice(report)]


def _plain(value: Any) -> Any:
    """Return a value for JSON: named tuples as objects and other sequences as lists, at every depth."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in cast("list[Any]", value)]
    return value
