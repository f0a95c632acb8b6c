"""Advice: with a GPU, the changes that make the setup fit; without, the changes that lower the peak most. Each change is
estimated."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.collector import without_collections
from memcalc.errors import InputError
from memcalc.inputs.options import check_options
from memcalc.report.changed import changed, shown
from memcalc.report.remedies import MORE_GPUS, Remedy, remedies

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.inputs.options import Options

_MOST: Final = 3
_WORTH: Final = 50
"""A change is worth a line if it saves more than one part in this many of the peak."""
_ROOM: Final = 10
"""A setup needs no advice if it has more than one part in this many of its GPU's memory to spare."""
_QUICK: Final = (
    "attention", "loss", "adapter dtype", "mask", "sync", "implementation", "micro-batch", "recompute", "shards", "ep",
    "gpus", "optimizer",
)  # fmt: skip
"""The kinds of changes that are tried if the peak is to be lowered: they cost one estimate each."""


class Proposal(NamedTuple):
    """Flags to add to the command, and the estimate with these flags. Sizes are bytes."""

    flags: str
    fits: bool | None
    """True if the setup with the flags fits the GPU; None without a GPU, or if it is not known."""
    device: int | None
    """`Report.device` with the flags; None without a GPU."""
    headroom: int | None
    """The bytes of the GPU to spare, negative if the setup does not fit; None without a GPU."""
    peak: int
    saves: int
    """The bytes by which the flags lower `device`; without a GPU, the bytes by which they lower `peak`."""
    costs: str
    """The costs of the flags in words; '' without a GPU."""
    answer: str | None = None
    """The verdict's answer with the flags (memcalc.device.verdict); None without a GPU."""
    gives_back: bool = False
    """True if the allocator gives segments back with the flags."""


@without_collections()
def advice(report: Report) -> list[Proposal]:
    """Return up to three lists of changes that make a setup fit its GPU, the cheapest first.

    If nothing makes it fit, return the list that comes closest. Without a GPU, or if the setup fits with little room, return the
    single changes that lower the peak most. Return [] for a setup that fits with enough room.
    """
    if report.given is None:
        return []
    given = check_options(report.given)
    if report.gpu is None or report.fits:
        roomy = report.gpu is not None and (report.headroom or 0) * _ROOM > report.gpu.capacity
        return [] if roomy else _lowest_peaks(report, given)
    from memcalc.report.found import suffices
    from memcalc.report.search import Search

    if suffices(report):
        return []
    found = Search(report, given).lists()
    return [_proposal(report, one.report, shown(one.flags)) for one in found if one.flags]


def _proposal(before: Report, after: Report, flags: str) -> Proposal:
    from memcalc.report.costs_in_words import costs

    saves = before.device - after.device
    verdict, numbers = after.verdict, (after.device, after.headroom, after.peak, saves)
    told = (None, False) if verdict is None else (verdict.answer, verdict.gives_back)
    return Proposal(flags, after.fits, *numbers, costs(before, after), *told)


class _Lower(NamedTuple):
    """One change that lowers the peak, and the estimate with it."""

    flags: str
    after: Report

    def proposal(self, before: Report) -> Proposal:
        """Return the change as a proposal that tells only about the peak."""
        peak = self.after.peak
        return Proposal(self.flags, None, None, None, peak, before.peak - peak, "")


def _lowest_peaks(report: Report, given: Options) -> list[Proposal]:
    """Return the single changes that lower the peak most, the best of each kind. With a GPU, return only those that fit it with
    room."""
    best: dict[str, _Lower] = {}
    for remedy in remedies(report):
        wanted = remedy.kind in _QUICK and not remedy.saves_less and (report.gpu is None or remedy.tier != MORE_GPUS)
        one = _lower(report, given, remedy) if wanted else None
        if one is not None and (report.peak - one.after.peak) * _WORTH > report.peak:
            best[remedy.kind] = min(one, best.get(remedy.kind, one), key=lambda lower: lower.after.peak)
    lowest = sorted(best.values(), key=lambda lower: lower.after.peak)
    if report.gpu is None:
        return [one.proposal(report) for one in lowest[:_MOST]]
    least = report.device - report.gpu.capacity // _WORTH
    roomy = (one for one in lowest if _fits_with_room(one.after) and one.after.device < least)
    return [_proposal(report, one.after, one.flags) for one in islice(roomy, _MOST)]


def _fits_with_room(report: Report) -> bool:
    return report.verdict is not None and report.verdict.answer == "fits"


def _lower(report: Report, given: Options, remedy: Remedy) -> _Lower | None:
    """Return one change and its estimate; None if the change is refused, or cannot lower a peak in the optimizer step."""
    if remedy.of_activations and report.peak_phase == "step":
        return None
    after = changed(given, report.setup, report.model, [remedy.ladder[remedy.usual]])
    if after is None:
        return None
    try:
        return _Lower(shown(after.flags), type(report)(report.model, after.setup))
    except InputError:
        return None
