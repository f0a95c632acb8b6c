"""The advice as lines under a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

from memcalc.report.advice import Proposal, advice
from memcalc.report.folding import Folded
from memcalc.report.verdict import EXPANDABLE
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memcalc.estimation.report import Report


def advice_lines(report: Report) -> list[RenderableType]:
    """Return a heading and the flags to add to the command; [] for a setup that fits with room."""
    found = advice(report)
    if not found:
        lost = report.verdict is not None and report.verdict.fits is False and report.given is not None
        return [_heading("no change that was tried makes it fit or lowers its peak")] if lost else []
    if found[0].device is None:
        return [_heading("what would help most"), *(Text(_peak_line(one)) for one in found)]
    if found[0].fits is False:
        return [
            _heading("no change that was tried makes it fit; the closest is"),
            *_lines(found[0], found[0].costs, _missing(found[0])),
        ]
    if report.states_only:
        heading = "what makes the model states fit; activations are not known without a model"
    else:
        heading = "what would leave more room" if report.fits else "what makes it fit"
    return [
        _heading(heading),
        *(line for one in found for line in _lines(one, "; ".join(filter(None, (_verdict(one), one.costs))))),
    ]


def _heading(words: str) -> Text:
    return Text(f"\n{words}", style="bold")


def _lines(one: Proposal, *under: str) -> list[RenderableType]:
    """Return a proposal's flags, and below them lines on what the flags lead to and cost."""
    return [Padding(Text(one.flags), (0, 0, 0, 2)), *(Padding(Folded(line), (0, 0, 0, 6)) for line in under)]


def _peak_line(one: Proposal) -> str:
    return f"  {one.flags:<40} saves {show_bytes(one.saves)}, leaves {show_bytes(one.peak)}"


def _verdict(one: Proposal) -> str:
    if one.answer == "tight" and one.gives_back:
        return "fits, but the allocator has to free cached memory (slower)"
    if one.answer == "tight":
        return f"fits, {show_bytes(one.headroom or 0)} to spare, less than the estimate's error"
    return f"fits, {show_bytes(one.headroom or 0)} to spare" if one.fits else "the model states fit"


def _missing(one: Proposal) -> str:
    if one.answer == "expandable":
        return f"fits with {EXPANDABLE}"
    over = -(one.headroom or 0)
    return f"still {show_bytes(over)} too much" if over > 0 else "the memory left is less than the estimate's error"
