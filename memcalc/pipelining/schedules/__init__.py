"""Schedules of papers and of torch that have a file each: their order of work, and what they keep more than others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final, NamedTuple

from memcalc.pipelining.actions import Action
from memcalc.pipelining.placement import Placement

NAMES: Final = (
    "naive",
    "dapple",
    "dapple-b",
    "pipedream",
    "pipedream-2bw",
    "chimera",
    "dualpipe",
    "dualpipev",
    "zbv",
)  # fmt: skip


class Schedule(NamedTuple):
    """The order of a schedule, and how its stages lie."""

    name: str
    order: Callable[[int, int, int], list[Action]]
    """Returns the forwards and backwards of a rank's step, from the rank, the number of ranks and that of micro-batches."""
    source: str
    """The paper or file that has the order."""
    placement: Placement = "in rounds"
    chunks: int = 1
    """The number of chunks of each rank."""
    halves: bool = False
    """True if backwards are cut into two halves."""
    joined: Callable[[int, int, int], frozenset[int]] = lambda rank, ranks, micro_batches: frozenset()
    """Returns the places in a rank's order of the forwards that overlap with the backward behind them."""
    unfit: Callable[[int, int], str | None] = lambda ranks, micro_batches: None
    """Returns the reason why so many ranks or micro-batches do not go, and what does; None if they go."""
    update_every: Callable[[int], int] | None = None
    """Returns the number of micro-batches from one update of the weights to the next, from that of a step. None: the
    weights are updated when the pipeline has been emptied, so that there is one version of them."""
    version: Callable[[int, int, int, int], int] | None = None
    """Returns the version of the weights that a micro-batch uses, from its number, the rank, the number of ranks and that
    of micro-batches in a step. Version v has had v updates."""
    enough: Callable[[int, int, int], int] = lambda rank, ranks, micro_batches: micro_batches
    """Returns the number of micro-batches with which a step has all the states of one with so many. It can be larger, if
    micro-batches of other steps are in flight."""


def schedule_of(name: str) -> Schedule:
    """Return a schedule by its name. Raises KeyError for a name that has no file."""
    if name not in NAMES:
        raise KeyError(name)
    return import_module(f"{__name__}.{name.replace('-', '_')}").SCHEDULE


def joined_of(name: str, ranks: int, micro_batches: int) -> list[frozenset[int]]:
    """Return for each rank the places of the forwards that overlap with the backward behind them."""
    if name not in NAMES:
        return [frozenset()] * ranks
    schedule = schedule_of(name)
    return [schedule.joined(rank, ranks, micro_batches) for rank in range(ranks)]


def has_halves(name: str) -> bool:
    """Tell whether a schedule cuts backwards into two halves, whether it has a file or not."""
    return name == "zero-bubble" or (name in NAMES and schedule_of(name).halves)


def flushes(name: str) -> bool:
    """Tell whether a schedule empties the pipeline before it updates the weights."""
    return name not in NAMES or schedule_of(name).update_every is None


def of_each_chunk(name: str, micro_batches: int) -> int:
    """Return how many of a step's micro-batches go through each chunk of a rank."""
    return micro_batches // 2 if placement_of(name) == "both ways" else micro_batches


def updates_of(name: str, micro_batches: int) -> int:
    """Return the number of updates of the weights in a step of so many micro-batches."""
    if name not in NAMES:
        return 1
    every = schedule_of(name).update_every
    return 1 if every is None else micro_batches // every(micro_batches)


def placement_of(name: str) -> Placement:
    """Return the way in which a schedule's stages lie, whether it has a file or not."""
    return schedule_of(name).placement if name in NAMES else "in rounds"


def versions(schedule: Schedule, rank: int, ranks: int, micro_batches: int) -> int:
    """Return the most versions of the weights that a rank needs at once: those of the micro-batches in flight, and the
    newest one, which the next update changes. Read from the order of a few steps without a pause between them."""
    if schedule.version is None or schedule.update_every is None:
        return 1
    each = schedule.update_every(micro_batches)
    steps = schedule.order(rank, ranks, 2 * ranks + 3 * micro_batches)
    in_flight: dict[int, int] = {}
    most, done = 1, 0
    for kind, _, i in steps:
        assert i is not None
        if kind == "forward":
            in_flight[i] = schedule.version(i, rank, ranks, micro_batches)
            most = max(most, len({done // each, *in_flight.values()}))
        else:
            del in_flight[i]
            done += 1
    return most


def in_their_order(steps: Sequence[tuple[str, int]]) -> list[Action]:
    """Return the actions of an order with their micro-batches: every chunk takes its micro-batches in their order."""
    done: dict[tuple[str, int], int] = {}
    out: list[Action] = []
    for kind, chunk in steps:
        parts = ("backward of inputs", "backward of weights") if kind == "backward" else (kind,)
        number = done.get((parts[0], chunk), 0)
        out.append(Action(kind, chunk, number))  # type: ignore[arg-type]
        for part in parts:
            done[part, chunk] = number + 1
    return out
