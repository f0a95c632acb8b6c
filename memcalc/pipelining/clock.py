"""The clock of a pipeline: when each rank runs its forwards and backwards, each as soon as its inputs are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

Step = tuple[str, int]
"""A kind of action ("forward", "backward", "backward of inputs", "backward of weights") and the rank's chunk."""
Seconds = Callable[[int, int, str], float]
"""Returns the seconds of a rank's chunk's action."""
_FORWARD: Final = "forward"
_WEIGHTS: Final = "backward of weights"


def makespan(orders: Sequence[Sequence[Step]], chunks: int, seconds: Seconds) -> float:
    """Return the seconds from the first action of any rank to the end of the last one. `orders` has each rank's actions."""
    ranks = len(orders)
    stages = ranks * chunks
    done: dict[tuple[bool, int, int], float] = {}
    counts: list[dict[Step, int]] = [{} for _ in orders]
    clocks, places = [0.0] * ranks, [0] * ranks
    waiting = list(range(ranks))
    while waiting:
        moved = False
        for rank in list(waiting):
            order = orders[rank]
            while places[rank] < len(order):
                kind, chunk = step = order[places[rank]]
                i = counts[rank].get(step, 0)
                ready = _ready(kind, chunk * ranks + rank, i, stages, done)
                if ready is None:
                    break
                clocks[rank] = max(clocks[rank], ready) + seconds(rank, chunk, kind)
                if kind != _WEIGHTS:
                    done[kind == _FORWARD, chunk * ranks + rank, i] = clocks[rank]
                counts[rank][step] = i + 1
                places[rank] += 1
                moved = True
            if places[rank] == len(order):
                waiting.remove(rank)
        assert moved, "the ranks wait for each other"
    return max(clocks)


def _ready(kind: str, stage: int, i: int, stages: int, done: dict[tuple[bool, int, int], float]) -> float | None:
    """Return the time at which an action's inputs are there; None if they are not yet."""
    if kind == _FORWARD:
        return 0.0 if stage == 0 else done.get((True, stage - 1, i))
    if kind == _WEIGHTS:
        return 0.0  # its other half has run on the same rank
    before = (True, stage, i) if stage == stages - 1 else (False, stage + 1, i)
    return done.get(before)
