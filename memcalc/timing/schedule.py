"""The time of a pipeline's forwards and backwards: the schedule played with each stage's own time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.megatron.schedules import actions
from memcalc.pipelining import orders
from memcalc.pipelining.clock import makespan
from memcalc.pipelining.schedules import NAMES, flushes, joined_of, placement_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.pipelining.clock import Seconds, Step
    from memcalc.setup.setup import Setup

_ROUNDS: Final = 3
"""The micro-batches per rank after which each further one takes as long as the busiest rank computes for it."""


class Turn(NamedTuple):
    """The seconds of one micro-batch in one chunk of one rank."""

    forward: float
    backward: float


def seconds_of_passes(setup: Setup, turns: Sequence[Sequence[Turn]]) -> float:
    """Return the seconds of all forwards and backwards of a step. `turns` has each rank's chunks."""
    chunks, many = len(turns[0]), setup.micro_batches
    if setup.pp == 1:
        return many * sum(one.forward + one.backward for one in turns[0])

    def seconds(rank: int, chunk: int, kind: str) -> float:
        turn = turns[rank][chunk]
        return turn.forward if kind == "forward" else turn.backward if kind == "backward" else turn.backward / 2

    if setup.schedule in NAMES:
        return _played(setup, chunks, seconds)
    group = setup.microbatch_group_size or setup.pp
    few = many if many <= _ROUNDS * group else _ROUNDS * group + many % group
    busiest = max(sum(turn.forward + turn.backward for turn in own) for own in turns)
    made = [_order(setup, rank, few, chunks) for rank in range(setup.pp)]
    return makespan(made, chunks, seconds) + (many - few) * busiest


def _played(setup: Setup, chunks: int, seconds: Seconds) -> float:
    """Return the seconds of a step of a schedule that has a file. Of many micro-batches, each further round of as many as
    ranks takes as long as the one before. A step of a pipeline that is never emptied is what it adds to others."""
    ranks, many = setup.pp, setup.micro_batches

    def until(micro_batches: int) -> float:
        made = [list(orders.steps(setup.schedule, rank, ranks, micro_batches, chunks)) for rank in range(ranks)]
        joined = joined_of(setup.schedule, ranks, micro_batches)
        return makespan(made, chunks, seconds, placement_of(setup.schedule), joined)

    if not flushes(setup.schedule):
        before, few = until(_ROUNDS * ranks), min(many, ranks)
        return (until(_ROUNDS * ranks + few) - before) * many / few
    few = many if many <= (_ROUNDS + 1) * ranks else _ROUNDS * ranks + many % ranks
    rounds = (many - few) // ranks
    begin = until(few)
    return begin + rounds * (until(few + ranks) - begin) if rounds else begin


def _order(setup: Setup, rank: int, micro_batches: int, chunks: int) -> list[Step]:
    if setup.engine == "fsdp2" or setup.schedule == "zero-bubble":
        return [(kind, chunk) for kind, chunk, _ in orders.order(setup.schedule, rank, setup.pp, micro_batches, chunks)]
    return list(actions(setup.schedule, rank, setup.pp, micro_batches, chunks, setup.microbatch_group_size))
