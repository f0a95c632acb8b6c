"""The clock of a pipeline: when each rank runs its forwards and backwards, each as soon as its inputs are there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.pipelining.placement import Place, Placement, place, stages

if TYPE_CHECKING:
    from collections.abc import Collection

Step = tuple[str, int]
"""A kind of action ("forward", "backward", "backward of inputs", "backward of weights") and the rank's chunk."""
Seconds = Callable[[int, int, str], float]
"""Returns the seconds of a rank's chunk's action."""
_FORWARD: Final = "forward"
_WEIGHTS: Final = "backward of weights"


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
    forward, backward = defaultdict[Place, list[float]](list), defaultdict[Place, list[float]](list)

    def turn(rank: int, kind: str, chunk: int) -> _Turn:
        at = place(placement, rank, ranks, chunk)
        before, after = Place(at.pipeline, at.stage - 1), Place(at.pipeline, at.stage + 1)
        if kind == _WEIGHTS:  # its other half has run on the same rank
            return _Turn(None, None, seconds(rank, chunk, kind))
        if kind == _FORWARD:
            return _Turn(forward[before] if at.stage else None, forward[at], seconds(rank, chunk, kind))
        return _Turn(forward[at] if at.stage == last else backward[after], backward[at], seconds(rank, chunk, kind))

    queues: list[list[tuple[_Turn, ...]]] = []
    for rank, order in enumerate(orders):
        turns = {step: turn(rank, *step) for step in set(order)}
        queues.append(_together([turns[step] for step in order], () if joined is None else joined[rank]))
    clocks, places, waiting = [0.0] * ranks, [0] * ranks, list(range(ranks))
    while waiting:
        before = sum(places)
        for rank in waiting:
            clocks[rank], places[rank] = _go_on(queues[rank], clocks[rank], places[rank])
        assert sum(places) > before, "the ranks wait for each other"
        waiting = [rank for rank in waiting if places[rank] < len(queues[rank])]
    return max(clocks)


class _Turn(NamedTuple):
    """All actions of one kind of a rank's chunk. The i-th of them is done when `done` has a time i."""

    inputs: list[float] | None
    """The times at which the inputs of each are there; None if they always are."""
    done: list[float] | None
    """The times at which each was done; None if nothing waits for it."""
    seconds: float


def _together(order: list[_Turn], joined: Collection[int]) -> list[tuple[_Turn, ...]]:
    """Return the actions, those together that overlap."""
    out: list[tuple[_Turn, ...]] = []
    i = 0
    while i < len(order):
        count = 2 if i in joined else 1
        out.append(tuple(order[i : i + count]))
        i += count
    return out


def _go_on(queue: list[tuple[_Turn, ...]], clock: float, at: int) -> tuple[float, int]:
    """Run a rank's actions from a place, until one has no inputs yet. Return the rank's time and the new place."""
    while at < len(queue):
        own, begin = queue[at], clock
        for inputs, done, _ in own:
            if inputs is not None:
                i = 0 if done is None else len(done)
                if i >= len(inputs):
                    return clock, at
                begin = max(begin, inputs[i])
        clock = begin + sum(turn.seconds for turn in own)
        for turn in own:
            if turn.done is not None:
                turn.done.append(clock)
        at += 1
    return clock, at
