"""The refusals of layouts of the same degrees, without resolving each of them.

A check of a setup (memcalc/setup) reads the degrees and at most one of three choices: the model chunks together with the
micro-batch, the shard group, or the recomputation. So a layout is refused if the first layout of its degrees is, with one
choice replaced by the layout's own (tests/planning/test_search.py).
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from memcalc.planning.layouts import Degrees, Layout


class Refusals(NamedTuple):
    """The lines with which layouts of the same degrees are refused; '' for those that are not. Either `alone` has each layout's
    line, or the other three have that of each choice."""

    steps: Mapping[tuple[int, int], str] = {}
    """The lines by model chunks and micro-batch."""
    shard_groups: Mapping[int | None, str] = {}
    recompute: Mapping[str, str] = {}
    alone: Mapping[Layout, str] | None = None

    def line(self, layout: Layout) -> str:
        """Return the line that refuses a layout; '' if none does."""
        if self.alone is not None:
            return self.alone[layout]
        step = self.steps[layout.virtual_stages, layout.micro_batch_size]
        return step or self.shard_groups[layout.shard_group] or self.recompute[layout.recompute]

    def refused(self) -> Counter[str]:
        """Return how many layouts each line refuses."""
        out = Counter[str]()
        left = self._choices()
        taken = 1
        for number, lines in enumerate(left):
            others = taken * prod(len(one) for one in left[number + 1 :])
            for line in filter(None, lines):
                out[line] += others
            taken *= sum(not line for line in lines)
        return out

    def valid(self) -> int:
        """Return the number of layouts that are not refused."""
        return prod(sum(not line for line in lines) for lines in self._choices())

    def _choices(self) -> list[list[str]]:
        by = (self.steps, self.shard_groups, self.recompute) if self.alone is None else (self.alone,)
        return [[*lines.values()] for lines in by]


def refusals_of(degrees: Degrees, line_of: Callable[[Layout], str]) -> Refusals:
    """Return the refusals of the layouts of these degrees. `line_of` returns the line that refuses a layout, by resolving it."""
    first = degrees.first
    line = line_of(first)
    if line:
        return _of_refused(degrees, line, line_of)

    def lines(name: str, values: tuple[Any, ...]) -> dict[Any, str]:
        return {value: line_of(first._replace(**{name: value})) if i else "" for i, value in enumerate(values)}

    steps = {
        (layout.virtual_stages, layout.micro_batch_size): "" if layout == first else line_of(layout)
        for layout in _steps(degrees)
    }
    groups, recompute = lines("shard_group", degrees.shard_groups), lines("recompute", degrees.recompute)
    return Refusals(steps, groups, recompute)


def _steps(degrees: Degrees) -> Iterator[Layout]:
    """Yield the layouts with every number of chunks and micro-batch."""
    for virtual, schedule in degrees.chunks:
        for batch in degrees.micro_batches:
            yield degrees.first._replace(virtual_stages=virtual, schedule=schedule, micro_batch_size=batch)


def _of_refused(degrees: Degrees, line: str, line_of: Callable[[Layout], str]) -> Refusals:
    """Return the refusals where the first layout is refused. If the last one, which shares no choice with it, is refused for
    the same option, all are; else each is looked at."""
    virtual, schedule = degrees.chunks[-1]
    last = degrees.first._replace(
        virtual_stages=virtual, schedule=schedule, shard_group=degrees.shard_groups[-1],
        recompute=degrees.recompute[-1], micro_batch_size=degrees.micro_batches[-1],
    )  # fmt: skip
    other = line_of(last)
    if other.split(":")[0] == line.split(":")[0]:
        steps = {(one.virtual_stages, one.micro_batch_size): line for one in _steps(degrees)}
        return Refusals(steps, dict.fromkeys(degrees.shard_groups, ""), dict.fromkeys(degrees.recompute, ""))
    return Refusals(alone={layout: line_of(layout) for layout in degrees.layouts()})
