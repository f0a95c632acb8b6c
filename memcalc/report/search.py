"""The search for the shortest lists of changes that make a setup fit its GPU: single changes, pairs, then many at once.

A list begins with the strongest form of each change. Changes that the list does not need are removed, cheap ones first, as
they save little. Then each change is weakened as far as the setup still fits.

Two rules save time. An estimate whose peak is above the GPU's capacity does not fit, so it is not played through the
allocator. Changes of activations are not tried alone if the peak of the optimizer's step is above the capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, combinations
from typing import TYPE_CHECKING, Final

from memcalc.errors import InputError
from memcalc.estimation.report import PHASES, Report
from memcalc.report.changed import changed
from memcalc.report.found import (
    SLICES,
    Found,
    Step,
    Steps,
    goes_with,
    has_room,
    likely_worst,
    seems_to,
    slowdown,
    suffices,
    tier_of,
    without,
)
from memcalc.report.remedies import MORE_GPUS, OTHER_TRAINING, SAME, Remedy, remedies

if TYPE_CHECKING:
    from memcalc.inputs.options import Options
    from memcalc.report.changed import Changed
    from memcalc.setup.setup import Setup

MOST_LISTS: Final = 3
_PAIRS: Final = 4
_WORTH: Final = 100
"""A change is tried in pairs if it saves more than one part in this many of the GPU's memory."""


class Search:
    """One search from a setup that does not fit its GPU.

    Several methods use the lean setup: every remedy at once that keeps the GPUs and the training.
    """

    def __init__(self, report: Report, given: Options, enough: Callable[[Report], bool] = seems_to) -> None:
        assert report.gpu is not None
        self.base, self.given, self.capacity = Found((), (), report), given, report.gpu.capacity
        self.enough = enough
        """The test of whether a setup fits: by default the first look. Proposals are tested by the full verdict; if one fails,
        the search is repeated with the full verdict for all."""
        self.remedies = remedies(report)
        self.rank = {id(remedy): i for i, remedy in enumerate(self.remedies)}
        """The order of the remedies, the cheapest first, by id."""
        self.alone: dict[int, Found | None] = {}
        """The estimates with the strongest form of one remedy alone, by the remedy's rank."""
        self.estimated: dict[Setup, Report | None] = {report.setup: report}
        self.hopeless: list[dict[int, int]] = []
        """The lists whose peak is above the capacity, as rungs by rank. A list with some of these remedies, none of them
        stronger, does not fit either."""

    # --- estimates

    def found(self, steps: Steps) -> Found | None:
        """Return a list with its estimate; None if the list is refused or changes nothing."""
        if not steps:
            return self.base
        after = self._changed(steps)
        report = None if after is None else self._report(after.setup)
        if after is None or report is None:
            return None
        if report.peak > self.capacity and not any(step.remedy.mixed for step in steps):
            self.hopeless.append(self._rungs(steps))
        return Found(steps, after.flags, report)

    def _rungs(self, steps: Steps) -> dict[int, int]:
        return {self.rank[id(step.remedy)]: step.rung for step in steps}

    def _fitting(self, steps: Steps, as_well_as: Report | None = None) -> Found | None:
        """Return a list with its estimate if it fits, else None. Return None also if the allocator gives segments back and it
        does not for `as_well_as`."""
        rungs = self._rungs(steps)
        if any(all(most.get(rank, -1) >= rung for rank, rung in rungs.items()) for most in self.hopeless):
            return None
        found = self.found(steps)
        if found is None or not self.enough(found.report):
            return None
        return None if as_well_as is not None and has_room(as_well_as) > has_room(found.report) else found

    def _changed(self, steps: Steps) -> Changed | None:
        base = self.base.report
        return changed(self.given, base.setup, base.model, (step.options for step in steps))

    def _report(self, setup: Setup) -> Report | None:
        """Return the estimate of a setup; None if it is refused. For a pipeline it is the estimate of one rank: the other ranks
        follow when a list is proposed."""
        if setup not in self.estimated:
            base = self.base.report
            try:
                self.estimated[setup] = Report(base.model, setup._replace(pp_rank=likely_worst(base, setup)))
            except InputError:  # some refusals show only in a run
                self.estimated[setup] = None
        return self.estimated[setup]

    def _of_all_ranks(self, found: Found) -> Found:
        """Return a list with the estimate of all pipeline ranks of which one can be the worst."""
        after = self._changed(found.steps) if found.steps else None
        if after is None or after.setup == found.report.setup:
            return found
        return found._replace(report=Report(found.report.model, after.setup, fullest=True))

    def _with(self, steps: Steps, remedy: Remedy) -> Steps | None:
        """Return a list with one more change, in the strongest form that is not refused; None if all forms are refused."""
        for rung in range(len(remedy.ladder) - 1, -1, -1):
            more = (*steps, Step(remedy, rung))
            if self._changed(more) is not None:
                return more
        return None

    def _alone(self, remedy: Remedy) -> Found | None:
        rank = self.rank[id(remedy)]
        if rank not in self.alone:
            steps = self._with((), remedy)
            self.alone[rank] = None if steps is None else self.found(steps)
        return self.alone[rank]

    # --- lists

    def lists(self) -> list[Found]:
        """Return up to three lists that fit, the cheapest first; if none fits, the list that comes closest."""
        out = self._single(SAME) or self._pairs() or self._many()
        if out:
            for tier in (MORE_GPUS, OTHER_TRAINING):
                out += self._single(tier) if len(out) < MOST_LISTS else []
        else:
            bigger = self._single(MORE_GPUS)
            out = [*bigger, *self._fewer_gpus(min((found.report.setup.gpus for found in bigger), default=None))]
            out += self._single(OTHER_TRAINING) or self._other_training()
        distinct = {found.flags: found for found in sorted(out or self._sliced(), key=self._dearness)}
        proposed: list[Found] = []
        for found in map(self._of_all_ranks, distinct.values()):
            if len(proposed) == MOST_LISTS:
                break
            if suffices(found.report):
                proposed.append(found)
            elif self.enough is seems_to:
                return self._by_verdicts().lists()
        return proposed or [self._of_all_ranks(self._closest())]

    def _by_verdicts(self) -> Search:
        """Return the search with full verdicts instead of first looks. It shares the estimates."""
        other = Search(self.base.report, self.given, suffices)
        other.estimated, other.hopeless = self.estimated, self.hopeless
        return other

    def _single(self, tier: int) -> list[Found]:
        """Return single changes of a tier that fit, at most three, the cheapest first."""
        best: dict[tuple[str, str | None], Found] = {}
        for remedy in self.remedies:
            if remedy.tier != tier or self._cannot(remedy):
                continue
            kind = remedy.kind, remedy.ladder[-1].get("engine")
            if kind not in best and len(best) == MOST_LISTS:
                break
            alone = None if kind in best or remedy.saves_less else self._alone(remedy)
            if alone is not None and self.enough(alone.report):
                best[kind] = self._weakened(alone)
        return sorted(best.values(), key=self._dearness)

    def _cannot(self, remedy: Remedy) -> bool:
        """Return True if a remedy lowers activations only and the optimizer's step is above the capacity without them."""
        return remedy.of_activations and self.base.report.phases["step"] > self.capacity

    def _pairs(self) -> list[Found]:
        """Return pairs of changes that fit together. The pairs that are tried are the cheapest likely ones."""
        base = self.base.report.phases
        known: list[tuple[Remedy, dict[str, int]]] = []
        for remedy in self.remedies:
            alone = self.alone.get(self.rank[id(remedy)])
            if alone is None or remedy.tier != SAME:
                continue
            saves = {phase: base[phase] - alone.report.phases[phase] for phase in PHASES}
            if max(saves.values()) * _WORTH > self.capacity:
                known.append((remedy, saves))
        likely: list[tuple[Remedy, Remedy]] = []
        for (one, saves), (other, more) in combinations(known, 2):
            left = max(base[phase] - saves[phase] - more[phase] for phase in PHASES)
            if one.kind != other.kind and left <= self.capacity:
                likely.append((one, other))
        out: list[Found] = []
        for one, other in sorted(likely, key=lambda pair: sum(self.rank[id(remedy)] for remedy in pair))[:_PAIRS]:
            steps = self._with((), one)
            pair = self._all_of([other], steps or ())
            if self.enough(pair.report):
                out.append(self._finished(pair))
        return out

    def _all_of(self, wanted: Iterable[Remedy], steps: Steps = ()) -> Found:
        """Return a list with the strongest form of every wanted change that it accepts, one of each kind."""
        for remedy in wanted:
            if all(step.remedy.kind != remedy.kind for step in steps):
                steps = self._with(steps, remedy) or self._in_place_of_one(steps, remedy) or steps
        return self.found(steps) or self.base

    def _in_place_of_one(self, steps: Steps, remedy: Remedy) -> Steps | None:
        """Return the list with a change in the place of one that excludes it; None if that does not lower the peak."""
        if self._with((), remedy) is None:
            return None
        for step in steps:
            others = tuple(other for other in steps if other is not step)
            instead = self._with(others, remedy)
            if instead is not None:
                after, before = self.found(instead), self.found(steps)
                return instead if after and before and after.report.peak < before.report.peak else None
        return None

    def _lean(self) -> Found:
        """Return the lean setup: every remedy at once that keeps the GPUs and the training and cannot need more memory."""
        return self._all_of(remedy for remedy in self.remedies if remedy.tier == SAME and not remedy.mixed)

    def _many(self) -> list[Found]:
        """Return the lean setup if it fits, else the lean setup with slices of one kind; [] if none fits."""
        lean = self._lean()
        if self.enough(lean.report):
            return [self._finished(lean)]
        for remedy in self.remedies:
            more = self._all_of([remedy], lean.steps) if remedy.mixed else lean
            if self.enough(more.report):
                return [self._finished(more)]
        return []

    def _fewer_gpus(self, than: int | None) -> list[Found]:
        """Return the lean setup on the fewest GPUs on which it fits; [] if these are not fewer than `than` GPUs."""
        lean, out = self._lean(), list[Found]()
        for remedy in self.remedies:
            if remedy.tier == MORE_GPUS and than != remedy.ladder[0]["gpus"]:
                more = self._all_of([remedy], lean.steps)
                if self.enough(more.report):
                    out.append(self._lowest_rung(more, more.steps[-1]))
        least = min(out, key=lambda found: found.report.setup.gpus, default=None)
        if least is None or (than is not None and least.report.setup.gpus >= than):
            return []
        return [self._finished(least)]

    def _other_training(self) -> list[Found]:
        """Return the lean setup with the first other training that makes it fit; [] if none does."""
        lean = self._lean()
        for remedy in self.remedies:
            if remedy.tier == OTHER_TRAINING:
                more = self._all_of([remedy], lean.steps)
                if self.enough(more.report):
                    return [self._finished(more)]
        return []

    def _sliced(self) -> list[Found]:
        """Return the lean setup on the most GPUs with slices that make it fit: of one kind, or of tensors and layers.

        If that is not enough, other training is added. Return [] if nothing fits.
        """
        slices = [remedy for remedy in self.remedies if remedy.kind in SLICES]
        together = (
            [[one] for one in slices],
            [[one, other] for one in slices for other in slices if goes_with(one, other)],
        )
        for most in (MORE_GPUS, OTHER_TRAINING):
            rest = [remedy for remedy in self.remedies if SAME < remedy.tier <= most]
            for added in chain(*together):
                # GPUs and slices first: they decide which stages and buffers are possible
                more = self._all_of([*(one for one in rest if one.tier == MORE_GPUS), *added], self._lean().steps)
                more = self._all_of(rest, more.steps)
                if self.enough(more.report):
                    return [self._finished(more)]
        return []

    def _closest(self) -> Found:
        """Return the list that comes closest: the lowest peak of the setup itself, the lean setup, and every remedy on the
        most GPUs with other training. Changes that lower nothing are removed; if the list fits after all, all that it does not
        need."""
        far = [remedy for remedy in self.remedies if remedy.tier != SAME]
        found = min((self._all_of(far, self._lean().steps), self._lean(), self.base), key=lambda one: one.report.peak)
        return self._finished(found) if self.enough(found.report) else self._needed(found)

    # --- a list that fits

    def _finished(self, found: Found) -> Found:
        """Return a fitting list without the changes that it does not need, each as weak as possible."""
        return self._shortest(self._weakened(self._shortest(found)))

    def _shortest(self, found: Found) -> Found:
        """Return a fitting list without the changes that it does not need to fit."""
        if len(found.steps) > 1:
            for step in self._from_cheap_to_dear(found):
                rest = self._fitting(without(found, step))
                if rest is not None:
                    return self._shortest(rest)
        return found

    def _needed(self, found: Found) -> Found:
        """Return a list that does not fit without the changes that do not lower its peak."""
        for step in self._from_cheap_to_dear(found):
            rest = self.found(without(found, step))
            if rest is not None and rest.report.peak <= found.report.peak:
                return self._needed(rest)
        return found

    def _weakened(self, found: Found) -> Found:
        """Return a fitting list with each change in the weakest form that still fits, expensive changes first. A cheaper
        remedy of the same kind replaces a change if it is enough."""
        for step in reversed(self._from_cheap_to_dear(found)):
            other = self._other_of_its_kind(found, step)
            found = self._lowest_rung(found, step) if other is None else self._cheaper(found, step, other)
        return found

    def _lowest_rung(self, found: Found, step: Step) -> Found:
        """Return a fitting list with a step at the lowest rung that fits, found by bisection. A long ladder, and one of layers,
        starts at the rung of `_guess`."""
        at, low, high, reach = found.steps.index(step), 0, step.rung, 1
        probe = self._guess(found, step) if high > 8 or step.remedy.kind == "recompute" else high // 2
        while low < high:
            weaker = self._instead(found, found.steps[at], Step(step.remedy, min(max(probe, low), high - 1)))
            if weaker is not None:
                found, high = weaker, weaker.steps[at].rung
                probe = max(high - reach, (low + high) // 2)
            else:
                low = min(max(probe, low), high - 1) + 1
                probe = min(low + reach - 1, (low + high) // 2)
            reach *= 2
        return found

    def _guess(self, found: Found, step: Step) -> int:
        """Return the rung that would fit if each rung lowered the peak and `device` by the same bytes."""
        rest = self.found(without(found, step))
        most = 0 if rest is None else rest.report.peak - found.report.peak
        if rest is None or most <= 0:
            return step.rung // 2
        over = rest.report.peak + found.report.device - found.report.peak + found.report.margin - self.capacity
        return over * (step.rung + 1) // most

    def _other_of_its_kind(self, found: Found, step: Step) -> Found | None:
        """Return the list with a weaker remedy of the same kind in the place of a step; None if none fits."""
        for remedy in self.remedies:
            if remedy.saves_less and remedy.kind == step.remedy.kind and remedy is not step.remedy:
                other = self._instead(found, step, Step(remedy, len(remedy.ladder) - 1))
                if other is not None:
                    return other
        return None

    def _cheaper(self, found: Found, step: Step, other: Found) -> Found:
        """Return the cheaper of two lists: `other`, or `found` with a step at a lower rung. The search for that rung starts
        where the step costs as many FLOPs as in `other`."""
        base = self.base.report.flops["total"]
        whole, share = (one.report.flops["total"] - base for one in (found, other))
        rung = (step.rung + 1) * share // whole - 1 if whole > share > 0 else -1
        less = self._instead(found, step, Step(step.remedy, rung)) if rung >= 0 else None
        if less is None:
            return other
        less = self._lowest_rung(less, less.steps[found.steps.index(step)])
        return min(less, other, key=self._dearness)

    def _instead(self, found: Found, step: Step, other: Step) -> Found | None:
        """Return the list with `other` in the place of a step; None if it does not fit. If the step adds GPUs, the list with
        fewer may make the allocator give segments back; otherwise it may not."""
        as_well_as = None if step.remedy.tier == MORE_GPUS else found.report
        return self._fitting(tuple(other if one is step else one for one in found.steps), as_well_as)

    # --- what it costs

    def _from_cheap_to_dear(self, found: Found) -> list[Step]:
        return sorted(found.steps, key=lambda step: self.rank[id(step.remedy)])

    def _dearness(self, found: Found) -> tuple[float, ...]:
        """Return the sort key of lists: other training, the number of GPUs, the number of changes, and segments given back; then
        the slowdown, then the order of the remedies."""
        training = tier_of(found) == OTHER_TRAINING
        ranks = sorted((self.rank[id(step.remedy)] for step in found.steps), reverse=True)
        slower = slowdown(self.base.report, found.report)
        return (training, found.report.setup.gpus, len(found.steps), not has_room(found.report), *slower, *ranks)
