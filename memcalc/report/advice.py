"""What to change: with a GPU what makes the setup fit it, without one what lowers the peak most. Each is an estimate."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.collector import without_collections
from memcalc.errors import InputError
from memcalc.inputs.options import check_options
from memcalc.report.changed import changed, shown
from memcalc.report.costs_in_words import costs
from memcalc.report.remedies import MORE_GPUS, Remedy, remedies

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.inputs.options import Options

_MOST: Final = 3
_WORTH: Final = 50
"""A change that saves less than a fiftieth of the peak is not worth a line."""
_ROOM: Final = 10
"""A setup with more than a tenth of its GPU to spare needs no advice."""
_QUICK: Final = (
    "attention", "loss", "mask", "sync", "implementation", "micro-batch", "recompute", "shards", "ep", "gpus", "optimizer",
)  # fmt: skip
"""Kinds that are tried where there is no GPU to fit: one estimate each."""


class Proposal(NamedTuple):
    """Flags to add to the command, and what the estimate with them says. Sizes are bytes."""

    flags: str
    fits: bool | None
    """The verdict with them; None without a GPU, or where it is not known."""
    device: int | None
    """`Report.device` with them; None where there is no GPU to fit."""
    headroom: int | None
    """What is left of the GPU's memory, negative where it is too little."""
    peak: int
    saves: int
    """Of `device`; of `peak` where that is None."""
    costs: str
    """What they cost, in words; '' where there is no GPU to fit."""
    answer: str | None = None
    """The verdict's (memcalc.device.verdict); None without a GPU."""
    gives_back: bool = False
    """True if the allocator gives segments back then."""


@without_collections()
def advice(report: Report) -> list[Proposal]:
    """At most three lists of changes that make a setup fit its GPU, cheap ones first; where nothing does, one that does not
    fit and comes closest. For a setup that has no GPU, or fits it narrowly, the changes that lower the peak most."""
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
    saves = before.device - after.device
    verdict, numbers = after.verdict, (after.device, after.headroom, after.peak, saves)
    told = (None, False) if verdict is None else (verdict.answer, verdict.gives_back)
    return Proposal(flags, after.fits, *numbers, costs(before, after), *told)


class _Lower(NamedTuple):
    """One change that lowers the peak."""

    flags: str
    after: Report

    def proposal(self, before: Report) -> Proposal:
        """By the peak alone."""
        peak = self.after.peak
        return Proposal(self.flags, None, None, None, peak, before.peak - peak, "")


def _lowest_peaks(report: Report, given: Options) -> list[Proposal]:
    """The single changes that save most, the best of each kind; with a GPU those that fit it with room then."""
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
    """One change and its estimate; None where it is refused, or leaves what the peak is made of."""
    if remedy.of_activations and report.peak_phase == "step":
        return None
    after = changed(given, report.setup, report.model, [remedy.ladder[remedy.usual]])
    if after is None:
        return None
    try:
        return _Lower(shown(after.flags), type(report)(report.model, after.setup))
    except InputError:
        return None
