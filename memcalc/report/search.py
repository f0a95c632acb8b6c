"""The shortest lists of changes that make a setup fit its GPU: single ones, pairs, then all that helps at once.

A list is first made of each change's strongest form. It is stripped of what it fits without, cheap changes first, as they save
little, and then each change is weakened as far as the verdict allows. An estimate whose peak is above the GPU's capacity cannot
fit, and is not played through the allocator; changes of activations are not tried alone where the optimizer's step is above it.
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
"""A change that saves less than a hundredth of the GPU's memory is in no pair."""


class Search:
    """One search from a setup that does not fit."""

    def __init__(self, report: Report, given: Options, enough: Callable[[Report], bool] = seems_to) -> None:
        assert report.gpu is not None
        self.base, self.given, self.capacity = Found((), (), report), given, report.gpu.capacity
        self.enough = enough
        """What tells whether a setup fits. A proposal does so by its verdict; where one that seemed to does not, all are
        asked for theirs."""
        self.remedies = remedies(report)
        self.rank = {id(remedy): i for i, remedy in enumerate(self.remedies)}
        """Cheap remedies have low ones."""
        self.alone: dict[int, Found | None] = {}
        """By the remedy's rank: the estimate with its strongest form and nothing else."""
        self.estimated: dict[Setup, Report | None] = {report.setup: report}
        self.hopeless: list[dict[int, int]] = []
        """Lists whose peak is above the capacity, as rungs by rank: so it is with less of the same."""

    # --- estimates

    def found(self, steps: Steps) -> Found | None:
        """The estimate of a list; None where it is refused or changes nothing."""
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
        """The estimate of a list that fits; None for others, and for one that is tight where `as_well_as` is not."""
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
        """The estimate, of a pipeline that of one rank: the whole one comes when a list is proposed."""
        if setup not in self.estimated:
            base = self.base.report
            try:
                self.estimated[setup] = Report(base.model, setup._replace(pp_rank=likely_worst(base, setup)))
            except InputError:  # that only a run shows
                self.estimated[setup] = None
        return self.estimated[setup]

    def _of_all_ranks(self, found: Found) -> Found:
        """Return it with the estimate of the worst pipeline rank."""
        after = self._changed(found.steps) if found.steps else None
        if after is None or after.setup == found.report.setup:
            return found
        return found._replace(report=Report(found.report.model, after.setup))

    def _with(self, steps: Steps, remedy: Remedy) -> Steps | None:
        """A list and the strongest form of one more change that is not refused on top of it."""
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
        """At most three lists that fit, cheap ones first; where there is none, one that comes closest."""
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
        """Return the same search by full verdicts, with the estimates that are there."""
        other = Search(self.base.report, self.given, suffices)
        other.estimated, other.hopeless = self.estimated, self.hopeless
        return other

    def _single(self, tier: int) -> list[Found]:
        """Single changes that fit, the first three from cheap to dear."""
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
        """Tell whether a change of activations cannot be enough, as there is too much without any."""
        return remedy.of_activations and self.base.report.phases["step"] > self.capacity

    def _pairs(self) -> list[Found]:
        """Two changes that fit together, those first that cost least."""
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
        """A list and the strongest form of every change that goes with it, one of a kind."""
        for remedy in wanted:
            if all(step.remedy.kind != remedy.kind for step in steps):
                steps = self._with(steps, remedy) or self._in_place_of_one(steps, remedy) or steps
        return self.found(steps) or self.base

    def _in_place_of_one(self, steps: Steps, remedy: Remedy) -> Steps | None:
        """The list with a change that one of its changes has refused, in the place of that one; None where that saves less."""
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
        """All at once that computes the same with less memory on the GPUs that there are."""
        return self._all_of(remedy for remedy in self.remedies if remedy.tier == SAME and not remedy.mixed)

    def _many(self) -> list[Found]:
        """The lean setup, or that with slices of one kind."""
        lean = self._lean()
        if self.enough(lean.report):
            return [self._finished(lean)]
        for remedy in self.remedies:
            more = self._all_of([remedy], lean.steps) if remedy.mixed else lean
            if self.enough(more.report):
                return [self._finished(more)]
        return []

    def _fewer_gpus(self, than: int | None) -> list[Found]:
        """The lean setup on the fewest GPUs that it fits on, where these are fewer than single changes need."""
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
        """The lean setup with the first other training that makes it fit."""
        lean = self._lean()
        for remedy in self.remedies:
            if remedy.tier == OTHER_TRAINING:
                more = self._all_of([remedy], lean.steps)
                if self.enough(more.report):
                    return [self._finished(more)]
        return []

    def _sliced(self) -> list[Found]:
        """The lean setup on the most GPUs, with slices of one kind, or of tensors and layers, that make it fit there; with other
        training where that is not enough."""
        slices = [remedy for remedy in self.remedies if remedy.kind in SLICES]
        together = (
            [[one] for one in slices],
            [[one, other] for one in slices for other in slices if goes_with(one, other)],
        )
        for most in (MORE_GPUS, OTHER_TRAINING):
            rest = [remedy for remedy in self.remedies if SAME < remedy.tier <= most]
            for added in chain(*together):
                # slices first: what they leave decides which stages and buffers there can be
                more = self._all_of([*(one for one in rest if one.tier == MORE_GPUS), *added], self._lean().steps)
                more = self._all_of(rest, more.steps)
                if self.enough(more.report):
                    return [self._finished(more)]
        return []

    def _closest(self) -> Found:
        """All that helps on the most GPUs and with other training: what is missing then is missing with less, too."""
        far = [remedy for remedy in self.remedies if remedy.tier != SAME]
        found = min((self._all_of(far, self._lean().steps), self._lean(), self.base), key=lambda one: one.report.peak)
        return self._finished(found) if self.enough(found.report) else self._needed(found)

    # --- a list that fits

    def _finished(self, found: Found) -> Found:
        """Without what it does not need, and no stronger than it needs."""
        return self._shortest(self._weakened(self._shortest(found)))

    def _shortest(self, found: Found) -> Found:
        """Without the changes that it fits without."""
        if len(found.steps) > 1:
            for step in self._from_cheap_to_dear(found):
                rest = self._fitting(without(found, step))
                if rest is not None:
                    return self._shortest(rest)
        return found

    def _needed(self, found: Found) -> Found:
        """Of a list that does not fit: without the changes that lower nothing."""
        for step in self._from_cheap_to_dear(found):
            rest = self.found(without(found, step))
            if rest is not None and rest.report.peak <= found.report.peak:
                return self._needed(rest)
        return found

    def _weakened(self, found: Found) -> Found:
        """With the weakest form of each change that fits, dear ones first, and a cheaper one of its kind if there is one."""
        for step in reversed(self._from_cheap_to_dear(found)):
            other = self._other_of_its_kind(found, step)
            found = self._lowest_rung(found, step) if other is None else self._cheaper(found, step, other)
        return found

    def _lowest_rung(self, found: Found, step: Step) -> Found:
        """By halving; it begins where a straight line through the peaks without the step and with it says."""
        at, low, high, reach = found.steps.index(step), 0, step.rung, 1
        probe = self._guess(found, step) if high > 8 else high // 2
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
        """The rung that would do if the peak fell evenly from rung to rung, and `device` with it."""
        rest = self.found(without(found, step))
        most = 0 if rest is None else rest.report.peak - found.report.peak
        if rest is None or most <= 0:
            return step.rung // 2
        over = rest.report.peak + found.report.device - found.report.peak + found.report.margin - self.capacity
        return over * (step.rung + 1) // most

    def _other_of_its_kind(self, found: Found, step: Step) -> Found | None:
        """The list with another remedy in the place of this one that saves less and is enough."""
        for remedy in self.remedies:
            if remedy.saves_less and remedy.kind == step.remedy.kind and remedy is not step.remedy:
                other = self._instead(found, step, Step(remedy, len(remedy.ladder) - 1))
                if other is not None:
                    return other
        return None

    def _cheaper(self, found: Found, step: Step, other: Found) -> Found:
        """`other`, or the list with less of a step where that costs less: as much of it as costs the same is tried first."""
        base = self.base.report.flops["total"]
        whole, share = (one.report.flops["total"] - base for one in (found, other))
        rung = (step.rung + 1) * share // whole - 1 if whole > share > 0 else -1
        less = self._instead(found, step, Step(step.remedy, rung)) if rung >= 0 else None
        if less is None:
            return other
        less = self._lowest_rung(less, less.steps[found.steps.index(step)])
        return min(less, other, key=self._dearness)

    def _instead(self, found: Found, step: Step, other: Step) -> Found | None:
        """With another step in the place of this one; None where that does not fit. More GPUs are dearer than segments that are
        given back, other changes are not."""
        as_well_as = None if step.remedy.tier == MORE_GPUS else found.report
        return self._fitting(tuple(other if one is step else one for one in found.steps), as_well_as)

    # --- what it costs

    def _from_cheap_to_dear(self, found: Found) -> list[Step]:
        return sorted(found.steps, key=lambda step: self.rank[id(step.remedy)])

    def _dearness(self, found: Found) -> tuple[float, ...]:
        """First what no time tells: other training, more GPUs, how many changes, segments that are given back. Then the time
        that they take."""
        training = tier_of(found) == OTHER_TRAINING
        ranks = sorted((self.rank[id(step.remedy)] for step in found.steps), reverse=True)
        slower = slowdown(self.base.report, found.report)
        return (training, found.report.setup.gpus, len(found.steps), not has_room(found.report), *slower, *ranks)
