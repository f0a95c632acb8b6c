"""The answer of a search: the plans, what became of all other layouts, and what would fit if nothing does."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.inputs.gpu import all_gpus, load_gpu
from memcalc.planning.evaluation import EXACT, FLOOR, Group
from memcalc.planning.search import Counts, Near, outside_of
from memcalc.planning.why import why_better

if TYPE_CHECKING:
    from memcalc.planning.evaluation import Evaluator
    from memcalc.planning.layouts import Layout
    from memcalc.planning.search import Fit, Search
    from memcalc.planning.target import Target

_NEAREST: Final = 6
"""The smallest layouts whose exact bytes are asked for, where nothing fits."""


class Plan(NamedTuple):
    """One layout of the answer."""

    rank: int
    layout: Layout
    options: Mapping[str, Any]
    """The options with which `memcalc.estimate` gives the same numbers."""
    document: Mapping[str, Any]
    """`setup`, `memory`, `fit` and `time` of that estimate."""
    gpu_hours: float
    cost: float | None
    days: float | None
    why: str

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.document["time"]["seconds_per_step"]

    @property
    def device(self) -> int:
        """Return the bytes that the GPU shows in use."""
        return self.document["memory"]["device"]


class Point(NamedTuple):
    """A layout that was evaluated and whose peak is within the GPU's memory."""

    seconds: float
    nbytes: int


class NoFit(NamedTuple):
    """The layout that is nearest to fitting, where nothing fits."""

    layout: Layout
    needs: int
    """The bytes of the device that it needs at least."""
    row: str
    gpus_that_do: tuple[str, ...]
    """The names of GPUs with that much memory."""


@dataclass(frozen=True)
class Plans:
    """The best layouts, the best first."""

    model: str
    """The model's name; '' if it has none."""
    plans: tuple[Plan, ...]
    target: Target
    counts: Counts
    slower: int
    """The layouts whose bound is above the last plan."""
    clusters: tuple[tuple[str, int], ...]
    points: tuple[Point, ...]
    no_fit: NoFit | None
    """The nearest layout; None if something fits or the search was stopped."""
    best_missing: Plan | None
    """The best layout that fits but misses the target, if no plan meets it."""
    elapsed_seconds: float
    complete: bool

    @property
    def fits(self) -> bool:
        """Tell whether there is a plan."""
        return bool(self.plans)

    @property
    def pareto(self) -> tuple[int, ...]:
        """Return the places of the plans on the Pareto front: no other plan is both faster and smaller."""
        return tuple(
            i
            for i, one in enumerate(self.plans)
            if not any(_dominates(other, one) for other in self.plans if other is not one)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plans as the JSON document."""
        counts = self.counts
        return {
            "schema_version": 1,
            "plans": [_plan(one) for one in self.plans],
            "pareto": list(self.pareto),
            "layouts": {
                "enumerated": counts.enumerated,
                "invalid": counts.invalid.total(),
                "too_large": counts.too_large.total(),
                "misses_target": counts.misses,
                "unknown": counts.unknown.total(),
                "slower": self.slower,
                "evaluated": counts.evaluated,
                "invalid_by_option": _by_option(counts),
                "too_large_by_row": dict(counts.too_large.most_common()),
            },
            "objective": self.target.objective,
            "clusters": [{"gpu": gpu, "gpus": gpus} for gpu, gpus in self.clusters],
            "no_fit": None if self.no_fit is None else _no_fit(self.no_fit),
            "misses_target": None if self.best_missing is None else _plan(self.best_missing),
            "elapsed_seconds": self.elapsed_seconds,
            "complete": self.complete,
        }


def _dominates(one: Plan, other: Plan) -> bool:
    better = one.seconds <= other.seconds and one.device <= other.device
    return better and (one.seconds, one.device) != (other.seconds, other.device)


def _by_option(counts: Counts) -> dict[str, int]:
    """Return the refused layouts by the option that each refusal names."""
    out: dict[str, int] = {}
    for line, times in counts.invalid.most_common():
        name = line.split(" ", 1)[0].rstrip(":")
        out[name] = out.get(name, 0) + times
    return dict(sorted(out.items(), key=lambda item: -item[1]))


def _plan(one: Plan) -> dict[str, Any]:
    return {
        "rank": one.rank,
        **one.document,
        "options": dict(one.options),
        "gpu_hours": one.gpu_hours,
        "cost": one.cost,
        "days": one.days,
        "why": one.why,
    }


def _no_fit(one: NoFit) -> dict[str, Any]:
    capacity = load_gpu(one.layout.gpu).capacity
    return {
        "options": {name: value for name, value in one.layout._asdict().items() if value is not None},
        "needs": one.needs,
        "over_by": one.needs - capacity,
        "row": one.row,
        "gpus_with_room": list(one.gpus_that_do),
    }


def plans_of(
    search: Search, evaluator: Evaluator, clusters: list[tuple[str, int]], missing: Fit | None, elapsed: float
) -> Plans:
    """Return the answer of a search that has ended. `missing`: the best layout without the target's limits, if no layout is
    within them."""
    target = search.target
    made: list[Plan] = []
    for i, fit in enumerate(search.found):
        made.append(_made(i + 1, fit, target, evaluator))
    following = [*made[1:], None][: len(made)]
    plans = tuple(one._replace(why=why_better(one, other, target)) for one, other in zip(made, following, strict=True))
    points = tuple(Point(seconds, nbytes) for _, seconds, nbytes in search.fitting)
    nothing = search.complete and not plans and not search.fitting and missing is None and bool(search.near)
    no_fit = nearest_of(search.near, evaluator) if nothing else None
    best_missing = None if missing is None else _made(1, missing, target, evaluator)
    return Plans(
        evaluator.model.name or "",
        plans,
        target,
        search.counts,
        search.slower,
        tuple(clusters),
        points,
        no_fit,
        best_missing,
        elapsed,
        search.complete,
    )


def _made(rank: int, fit: Fit, target: Target, evaluator: Evaluator) -> Plan:
    layout, document = fit.layout, fit.judged.document
    seconds = document["time"]["seconds_per_step"]
    hours, cost = target.gpu_hours(layout.gpus, seconds), target.cost(layout.gpu, layout.gpus, seconds)
    options = evaluator.setup_options(layout)
    return Plan(rank, layout, options, document, hours, cost, target.days_of(seconds), "")


def nearest_of(near: list[Near], evaluator: Evaluator) -> NoFit:
    """Return the layout that lacks the fewest bytes: of those with the lowest bounds, by their exact bytes."""
    exact: list[tuple[int, Near]] = []
    queue = [(one.over, one.first, number, one) for number, one in enumerate(near)]
    heapq.heapify(queue)
    while queue and len(exact) < _NEAREST and (not exact or queue[0][0] < min(over for over, _ in exact)):
        _, _, _, one = heapq.heappop(queue)
        if isinstance(one.of, Group):
            for member in evaluator.members(one.of):
                needs = max(one.nbytes, member.bound.nbytes + outside_of(member.layout))
                found = Near(member.layout, needs, member.bound.row, FLOOR)
                heapq.heappush(queue, (found.over, found.first, member.place, found))
        else:
            found = one if one.known >= EXACT else _exactly(one, one.of, evaluator)
            exact.append((found.over, found))
    _, best = min(exact)
    rooms = sorted(all_gpus(), key=lambda gpu: (gpu.capacity, gpu.name))
    others = tuple(gpu.name for gpu in rooms if gpu.capacity >= best.nbytes)
    return NoFit(best.first, best.nbytes, best.row, others[:3])


def _exactly(one: Near, layout: Layout, evaluator: Evaluator) -> Near:
    found = evaluator.exact(layout)
    return one if found.why_not else Near(layout, max(one.nbytes, found.nbytes), found.row or one.row, EXACT)


__all__ = ["NoFit", "Plan", "Plans", "Point", "nearest_of", "outside_of", "plans_of"]
