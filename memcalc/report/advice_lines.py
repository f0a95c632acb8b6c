"""The advice in words, and as lines under a report."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.padding import Padding
from rich.text import Text

from memcalc.report.advice import Proposal, advice
from memcalc.report.folding import Folded
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memcalc.estimation.report import Report


class Change(NamedTuple):
    """A proposal's flags, and lines on what the flags lead to and cost."""

    flags: str
    under: tuple[str, ...]


class Advised(NamedTuple):
    """A heading, and the proposed changes; with `of_peaks` a change has one short line."""

    heading: str
    changes: tuple[Change, ...]
    of_peaks: bool = False


def advice_lines(report: Report) -> list[RenderableType]:
    """Return a heading and the flags to add to the command; [] for a setup that fits with room."""
    told = advised(report)
    if told is None:
        return []
    heading = Text(f"\n{told.heading}", style="bold")
    if told.of_peaks:
        return [heading, *(Text(f"  {one.flags:<40} {one.under[0]}") for one in told.changes)]
    return [heading, *(line for one in told.changes for line in _lines(one))]


def advised(report: Report) -> Advised | None:
    """Return the advice in words; None for a setup that fits with room."""
    found = advice(report)
    if not found:
        lost = report.verdict is not None and report.verdict.fits is False and report.given is not None
        return Advised("no change that was tried makes it fit or lowers its peak", ()) if lost else None
    if found[0].device is None:
        changes = tuple(Change(one.flags, (_lowered(one),)) for one in found)
        return Advised("what would lower the peak most", changes, of_peaks=True)
    if found[0].fits is False:
        change = Change(found[0].flags, (found[0].costs, _missing(found[0])))
        return Advised("no change that was tried makes it fit; the closest is", (change,))
    if report.states_only:
        heading = "what makes the model states fit; activations are not known without a model"
    else:
        heading = "what would leave more room" if report.fits else "what makes it fit"
    return Advised(
        heading, tuple(Change(one.flags, ("; ".join(filter(None, (_verdict(one), one.costs))),)) for one in found)
    )


def _lines(one: Change) -> list[RenderableType]:
    """Return a change's flags, and below them its lines."""
    return [Padding(Text(one.flags), (0, 0, 0, 2)), *(Padding(Folded(line), (0, 0, 0, 6)) for line in one.under)]


def _lowered(one: Proposal) -> str:
    return f"saves {show_bytes(one.saves)}, leaves {show_bytes(one.peak)}"


def _verdict(one: Proposal) -> str:
    if one.answer == "tight" and one.gives_back:
        return "fits, but the allocator has to free cached memory (slower)"
    if one.answer == "tight":
        return f"fits, {show_bytes(one.headroom or 0)} to spare, less than the estimate's error"
    return f"fits, {show_bytes(one.headroom or 0)} to spare" if one.fits else "the model states fit"


def _missing(one: Proposal) -> str:
    if one.answer == "expandable":
        from memcalc.report.verdict import EXPANDABLE

        return f"fits with {EXPANDABLE}"
    over = -(one.headroom or 0)
    return f"still {show_bytes(over)} too much" if over > 0 else "the memory left is less than the estimate's error"
