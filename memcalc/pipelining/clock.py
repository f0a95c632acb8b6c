"""The clock of a pipeline: when each rank runs its forwards and backwards, each as soon as its inputs are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.pipelining.placement import Place, Placement, place, stages

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

Step = tuple[str, int]
"""A kind of action ("forward", "backward", "backward of inputs", "backward of weights") and the rank's chunk."""
Seconds = Callable[[int, int, str], float]
"""Returns the seconds of a rank's chunk's action."""
_FORWARD: Final = "forward"
_BACKWARD: Final = "backward"
_WEIGHTS: Final = "backward of weights"
_Done = tuple[bool, Place, int]


def makespan(
    orders: Sequence[Sequence[Step]],
    chunks: int,
    seconds: Seconds,
    placement: Placement = "in rounds",
    joined: Sequence[Collection[int]] | None = None,
) -> float:
    """Return the seconds from the first action of any rank to the end of the last one. `orders` has each rank's actions.
    `joined`: for each rank the places of the actions that overlap with the one behind them."""
    ranks = len(orders)
    last = stages(placement, ranks, chunks) - 1
    done: dict[_Done, float] = {}
    counts: list[dict[Step, int]] = [{} for _ in orders]
    clocks, places = [0.0] * ranks, [0] * ranks
    waiting = list(range(ranks))
    while waiting:
        moved = False
        for rank in list(waiting):
            order = orders[rank]
            while places[rank] < len(order):
                at_once = 2 if joined is not None and places[rank] in joined[rank] else 1
                own = [
                    _Turn(kind, place(placement, rank, ranks, chunk), counts[rank].get(_counted(kind, chunk), 0), chunk)
                    for kind, chunk in order[places[rank] : places[rank] + at_once]
                ]
                inputs = [_ready(turn.kind, turn.at, turn.i, last, done) for turn in own]
                ready = [time for time in inputs if time is not None]
                if len(ready) < len(inputs):
                    break
                clocks[rank] = max(clocks[rank], *ready) + sum(seconds(rank, turn.chunk, turn.kind) for turn in own)
                for kind, at, i, chunk in own:
                    if kind != _WEIGHTS:
                        done[kind == _FORWARD, at, i] = clocks[rank]
                    counts[rank][_counted(kind, chunk)] = i + 1
                places[rank] += at_once
                moved = True
            if places[rank] == len(order):
                waiting.remove(rank)
        assert moved, "the ranks wait for each other"
    return max(clocks)


class _Turn(NamedTuple):
    """An action, the place of its chunk, and its micro-batch."""

    kind: str
    at: Place
    i: int
    chunk: int


def _counted(kind: str, chunk: int) -> Step:
    """Return what an action counts as: a backward and a backward of the inputs count together."""
    return (kind if kind in (_FORWARD, _WEIGHTS) else _BACKWARD, chunk)


def _ready(kind: str, at: Place, i: int, last: int, done: Mapping[_Done, float]) -> float | None:
    """Return the time at which an action's inputs are there; None if they are not yet."""
    pipeline, stage = at
    if kind == _FORWARD:
        return 0.0 if stage == 0 else done.get((True, Place(pipeline, stage - 1), i))
    if kind == _WEIGHTS:
        return 0.0  # its other half has run on the same rank
    before = (True, at, i) if stage == last else (False, Place(pipeline, stage + 1), i)
    return done.get(before)
