"""The actions of every pipeline rank in a step, with the times at which they begin and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from memcalc.pipelining.orders import Action, Kind, Placed, as_soon_as_ready, micro_batches_per_round, placed
from memcalc.pipelining.schedules import NAMES, flushes, has_halves

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup


def lanes(setup: Setup, micro_batches: int) -> list[list[Placed]]:
    """Return the actions of every rank in the order of the setup's engine, for a step of so many micro-batches."""
    ranks, chunks = setup.pp, setup.virtual_stages
    if not flushes(setup.schedule):
        return _until_emptied(placed(setup.schedule, ranks, micro_batches + ranks, chunks), micro_batches)
    if setup.engine == "fsdp2" or setup.schedule in NAMES:
        return placed(setup.schedule, ranks, micro_batches, chunks)
    one = _of_deepspeed if setup.engine == "deepspeed" else _of_megatron
    return as_soon_as_ready([one(setup, rank, micro_batches) for rank in range(ranks)], chunks)


def _until_emptied(lanes: list[list[Placed]], micro_batches: int) -> list[list[Placed]]:
    """Return what ranks do until the first one has run the backwards of so many micro-batches. The pipeline goes on
    behind it."""
    end = [one.end for one in lanes[0] if one.action.kind == "backward"][micro_batches - 1]
    return [[one for one in lane if one.end <= end] for lane in lanes]


_ALIKE: Final = ("gpipe", "1f1b")
"""The schedules whose micro-batches need no rounds."""


def drawable(setup: Setup, most_actions: int) -> int:
    """Return the largest number of micro-batches, up to the setup's, that the schedule takes and that makes no more than
    so many actions; at least one round of them."""
    each = setup.pp * setup.virtual_stages * (3 if has_halves(setup.schedule) else 2)
    most = max(setup.pp, most_actions // each)
    if setup.micro_batches <= most:
        return setup.micro_batches
    if setup.schedule in NAMES:
        return min(setup.micro_batches, max(2, most // setup.pp) * setup.pp)
    if setup.schedule in _ALIKE:
        return most
    group = setup.microbatch_group_size or setup.pp
    whole = micro_batches_per_round(setup.pp, setup.micro_batches) if setup.engine == "fsdp2" else group
    return max(1, most // whole) * whole


def _of_megatron(setup: Setup, rank: int, micro_batches: int) -> list[Action]:
    from memcalc.megatron.schedules import actions

    return _counted(
        actions(setup.schedule, rank, setup.pp, micro_batches, setup.virtual_stages, setup.microbatch_group_size)
    )


def _of_deepspeed(setup: Setup, rank: int, micro_batches: int) -> list[Action]:
    from memcalc.engines.deepspeed.stages import instructions

    found = instructions(rank, setup.pp, micro_batches)
    return _counted((kind, 0) for kind, _ in found if kind == "forward" or kind == "backward")


def _counted(order: Iterable[tuple[Kind, int]]) -> list[Action]:
    """Return the actions of an order with their micro-batches: each kind takes a chunk's micro-batches in their order."""
    done: Counter[tuple[Kind, int]] = Counter()
    out: list[Action] = []
    for kind, chunk in order:
        out.append(Action(kind, chunk, done[kind, chunk]))
        done[kind, chunk] += 1
    return out
