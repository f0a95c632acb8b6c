"""Lists of changes with their estimates, whether the estimates fit, and what the changes cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.device.verdict import outside
from memcalc.hardware.cost import step_time
from memcalc.inputs.model import Model
from memcalc.pipelining.idle import idle_share
from memcalc.report.remedies import SAME, Remedy

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.setup.setup import Setup


class Step(NamedTuple):
    """A remedy and the rung of its ladder: how strong the change is."""

    remedy: Remedy
    rung: int

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.remedy.ladder[self.rung])


Steps = tuple[Step, ...]


class Found(NamedTuple):
    """A list of changes, its flags for the command, and its estimate."""

    steps: Steps
    flags: tuple[tuple[str, Any], ...]
    report: Report


def suffices(report: Report) -> bool:
    """Return True if a setup fits by its full verdict; for a bare number of parameters, if the model states do not exclude
    it."""
    gpu = report.gpu
    if gpu is None or report.peak + outside(report) > gpu.capacity:
        return False
    return report.is_fit if isinstance(report.model, Model) else report.fits is not False


def seems_to(report: Report) -> bool:
    """Return True if a setup fits by its first look, which is one play; for a bare number of parameters, if the model states do
    not exclude it."""
    look = report.first_look
    if look is None or report.peak + outside(report) > look.capacity:
        return False
    return look.fits is True or (look.fits is None and not isinstance(report.model, Model))


def has_room(report: Report) -> bool:
    """Return True if the allocator gives no segments back, by the first look of a setup."""
    return report.first_look is None or not report.first_look.gives_back


SLICES: Final = ("ep", "cp", "tp", "pp")


def likely_worst(base: Report, setup: Setup) -> int | None:
    """Return a pipeline rank that is probably among the fullest: the base's worst rank; with another number of stages, the
    first.

    Return None without a pipeline, and the given rank with `--pp-rank`.
    """
    if setup.pp == 1 or setup.pp_rank is not None:
        return setup.pp_rank
    return base.rank.number if setup.pp == base.setup.pp else 0


def goes_with(one: Remedy, other: Remedy) -> bool:
    """Return True if two kinds of slices are tried together: tensor parallelism, then pipeline parallelism."""
    return (one.kind, other.kind) == ("tp", "pp")


def without(found: Found, step: Step) -> Steps:
    return tuple(other for other in found.steps if other is not step)


def tier_of(found: Found) -> int:
    """Return the highest tier of a list's remedies: SAME, MORE_GPUS or OTHER_TRAINING."""
    return max((step.remedy.tier for step in found.steps), default=SAME)


def slowdown(before: Report, after: Report) -> tuple[float, int, int]:
    """Return how much more a step takes: seconds of products, bubbles and collectives as far as they are known, FLOPs, and bytes
    sent."""
    seconds = 0.0
    products = before.seconds_at_peak, after.seconds_at_peak
    if products[0] is not None and products[1] is not None:
        seconds += max(0.0, products[1] * (1 + idle_share(after.setup)) - products[0] * (1 + idle_share(before.setup)))
    times = [step_time(report.collectives, report.costs) for report in (before, after)]
    if times[0] is not None and times[1] is not None:
        seconds += max(0.0, times[1].total - times[0].total)
    sent = [sum(collective.wire for collective in report.collectives) for report in (before, after)]
    return seconds, max(0, after.flops["total"] - before.flops["total"]), max(0, sent[1] - sent[0])
