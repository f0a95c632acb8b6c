"""The order in which a rank of torch.distributed.pipelining runs its stages
(torch/distributed/pipelining/schedules.py).

The schedules are ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble. The
interleaved ones take any number of micro-batches that makes equal rounds. If that number divides by the ranks, the
interleaved order is Megatron-Core's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from memcalc.pipelining.actions import COMPUTES as COMPUTES
from memcalc.pipelining.actions import Action as Action
from memcalc.pipelining.actions import Kind as Kind
from memcalc.pipelining.actions import Step
from memcalc.pipelining.placement import Place, Placement, place, stages
from memcalc.pipelining.schedules import NAMES, flushes, joined_of, placement_of, schedule_of

GATHERED_AT_ONCE: Final = 3
"""The most chunks that the runtime keeps gathered (`max_active_stages`)."""

_REPEATS: Final = 3
"""The number of 1F1B's backwards, or of an interleaved schedule's rounds, after which nothing new comes until the last
ones."""


def order(schedule: str, rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    """Return the forwards and backwards of a rank's step in their order. Raises ValueError for a step that torch's
    schedule refuses."""
    if schedule in NAMES:
        return schedule_of(schedule).order(rank, ranks, micro_batches)
    done: Counter[tuple[Kind, int]] = Counter()
    out: list[Action] = []
    for kind, chunk in steps(schedule, rank, ranks, micro_batches, chunks):
        out.append(Action(kind, chunk, done[kind, chunk]))
        done[kind, chunk] += 1
    return out


def steps(schedule: str, rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> Iterator[Step]:
    """Yield the forwards and backwards of a rank's step in their order, as `order` does, without micro-batches."""
    if schedule in NAMES:
        return ((kind, chunk) for kind, chunk, _ in schedule_of(schedule).order(rank, ranks, micro_batches))
    return _ORDERS[schedule](rank, ranks, micro_batches, chunks)


def _gpipe(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Step]:
    for kind in ("forward", "backward"):
        for _ in range(micro_batches):
            yield kind, 0


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Step]:
    if micro_batches < ranks:
        raise ValueError(f"{micro_batches} micro-batches are fewer than {ranks} ranks")
    warmup = ranks - rank
    for _ in range(warmup):
        yield "forward", 0
    for i in range(micro_batches):
        yield "backward", 0
        if i < micro_batches - warmup:
            yield "forward", 0


def micro_batches_per_round(ranks: int, micro_batches: int) -> int:
    """Return the number of micro-batches that go through one chunk before the next chunk's turn. Raises ValueError if
    rounds are not equal."""
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise ValueError(f"{micro_batches} micro-batches do not make {rounds} equal rounds")
    return micro_batches // rounds


def _interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Step]:
    each, total = micro_batches_per_round(ranks, micro_batches), micro_batches * chunks
    warmup = min((chunks - 1) * each + 2 * (ranks - 1 - rank), total)
    for i in range(total + warmup):
        if i < total:
            yield "forward", i // each % chunks
        if i >= warmup:
            yield "backward", chunks - 1 - (i - warmup) // each % chunks


def _zero_bubble(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Step]:
    """Yield ZB1P's order: the half of a backward for the weights comes `rank` halves after the half for the inputs."""
    each, total = micro_batches_per_round(ranks, micro_batches), micro_batches * chunks
    warmup = min((chunks - 1) * each + ranks - 1 - rank, total)

    def chunk_of(i: int) -> int:
        return chunks - 1 - i // each % chunks

    for i in range(total + warmup):
        if i < total:
            yield "forward", i // each % chunks
        if i >= warmup:
            yield "backward of inputs", chunk_of(i - warmup)
            if i - warmup >= rank:
                yield "backward of weights", chunk_of(i - warmup - rank)
    for i in range(total - min(rank, total), total):
        yield "backward of weights", chunk_of(i)


_ORDERS = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}


def _next_chunks(actions: Sequence[Action]) -> list[list[int]]:
    """Return at each action the chunks that run next, from its own on: as many as are gathered at once."""
    coming: list[int] = []
    out: list[list[int]] = []
    for action in reversed(actions):
        coming = [action.chunk, *(chunk for chunk in coming if chunk != action.chunk)][:GATHERED_AT_ONCE]
        out.append(coming)
    return out[::-1]


def lowered(
    actions: Sequence[Action],
    rank: int,
    ranks: int,
    micro_batches: int,
    chunks: int,
    placement: Placement = "in rounds",
) -> list[Action]:
    """Return the actions of _PipelineScheduleRuntime without its receives.

    Sends, gathers, frees and reductions of parameters are added to the computing actions (_add_unshard_reshard,
    _add_reduce_grad, _add_send_recv). Nothing is sent between neighbouring stages of one rank.
    """
    own = [place(placement, rank, ranks, chunk) for chunk in range(chunks)]
    last = stages(placement, ranks, chunks) - 1
    gathered: list[int] = []
    done: Counter[int] = Counter()
    out: list[Action] = []
    for action, coming in zip(actions, _next_chunks(actions), strict=True):
        out += [Action("reshard", chunk, None) for chunk in sorted(gathered) if chunk not in coming]
        out += [Action("unshard", chunk, None) for chunk in coming if chunk not in gathered]
        gathered = coming
        out.append(action)
        pipeline, stage = own[action.chunk]
        if action.kind == "forward" and stage != last and Place(pipeline, stage + 1) not in own:
            out.append(action._replace(kind="send forward"))
        if action.kind in ("backward", "backward of inputs") and stage and Place(pipeline, stage - 1) not in own:
            out.append(action._replace(kind="send backward"))
        if action.kind in ("backward", "backward of weights"):
            done[action.chunk] += 1
            if done[action.chunk] == micro_batches:
                out.append(Action("reduce", action.chunk, None))
    return [*out, *(Action("reshard", chunk, None) for chunk in sorted(gathered))]


Wanted = Literal["unshard", "forward", "backward"]
WANTED: Final[tuple[Wanted, ...]] = ("unshard", "forward", "backward")


def gathers(actions: Sequence[Action], *, reshards: bool) -> Counter[tuple[int, Wanted]]:
    """Return how often a unit of a chunk's parameters is gathered, by the action that needs it.

    `reshards`: parameters are freed after every forward. After a backward they are not, until the step's last one
    (FSDP2's hooks under stage.py's backward_maybe_with_nosync).
    """
    calls: Counter[tuple[int, Wanted]] = Counter()
    whole: set[int] = set()
    for kind, chunk, _ in actions:
        if kind in ("reshard", "reduce"):
            whole.discard(chunk)
        elif kind in ("unshard", "forward", "backward", "backward of inputs"):
            if chunk not in whole:
                calls[chunk, "backward" if kind == "backward of inputs" else kind] += 1
            whole.add(chunk)
            if kind == "forward" and reshards:
                whole.discard(chunk)
    return calls


GPIPE_ENDS: Final = (2, 5)
"""The range of the micro-batch of a five-micro-batch GPipe step that stands for any number of others.

The first two are not like the others: the second one finds weights gathered and gradients to add to. The last ones are
not either: the last forward has most in flight.
"""


def enough_micro_batches(schedule: str, rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> int:
    """Return the number of micro-batches with which a step has all the states of one with `micro_batches`. The middle
    of a step repeats itself.

    With gpipe the middle repeats itself except for the number of micro-batches in flight.
    """
    if schedule in NAMES:
        return schedule_of(schedule).enough(rank, ranks, micro_batches)
    if schedule == "gpipe":
        return min(micro_batches, GPIPE_ENDS[1])
    if schedule == "1f1b":
        return min(micro_batches, ranks - rank + _REPEATS)
    each = micro_batches_per_round(ranks, micro_batches)
    return min(micro_batches, each * _REPEATS)


def most_in_flight(actions: Sequence[Action]) -> int:
    """Return the most forwards whose backward (in halves: whose half for the weights) has not begun."""
    live = most = 0
    for action in actions:
        if action.kind == "forward":
            live += 1
            most = max(most, live)
        elif action.kind in ("backward", "backward of weights"):
            live -= 1
    return most


_TIMES: Final[Mapping[str, int]] = {"forward": 1, "backward": 2, "backward of inputs": 1, "backward of weights": 1}
_Done = tuple[str, Place, int | None]


class Placed(NamedTuple):
    """An action of a rank, and the times at which it begins and ends."""

    action: Action
    start: int
    end: int


def placed(schedule: str, ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Placed]]:
    """Return every rank's actions with their times, if all chunks take equally long (`as_soon_as_ready`)."""
    orders = [order(schedule, rank, ranks, micro_batches, chunks) for rank in range(ranks)]
    return as_soon_as_ready(orders, chunks, placement_of(schedule), joined_of(schedule, ranks, micro_batches))


def as_soon_as_ready(
    orders: Sequence[Sequence[Action]],
    chunks: int,
    placement: Placement = "in rounds",
    joined: Sequence[Collection[int]] | None = None,
) -> list[list[Placed]]:
    """Return the actions of all ranks, each begun as soon as its inputs are there and its rank is free.

    A forward takes 1, and so does each half of a backward. `joined`: for each rank the places of the actions that overlap
    with the one behind them; what both make is there when both are over.
    """
    ranks = len(orders)
    last = stages(placement, ranks, chunks) - 1
    done: dict[_Done, int] = {}
    lanes: list[list[Placed]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, (actions, lane) in enumerate(zip(orders, lanes, strict=True)):
            while len(lane) < len(actions):
                at_once = 2 if joined is not None and len(lane) in joined[rank] else 1
                own = actions[len(lane) : len(lane) + at_once]
                at = [place(placement, rank, ranks, action.chunk) for action in own]
                inputs = [
                    _ready(action.kind, where, action.micro_batch, last, done)
                    for action, where in zip(own, at, strict=True)
                ]
                ready = [time for time in inputs if time is not None]
                if len(ready) < len(inputs):
                    break
                start = max(lane[-1].end if lane else 0, *ready)
                for action in own:
                    lane.append(Placed(action, start, start + _TIMES[action.kind]))
                    start = lane[-1].end
                for action, where in zip(own, at, strict=True):
                    if action.kind != "backward of weights":
                        kind = "forward" if action.kind == "forward" else "backward"
                        done[kind, where, action.micro_batch] = start
                moved = True
    return lanes


def bubble(schedule: str, ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the idle time over the ideal time of a step, if all chunks take equally long. If the pipeline is not emptied
    between steps, it is the idle time of a step behind others."""
    if flushes(schedule):
        return waited(placed(schedule, ranks, micro_batches, chunks))
    before, after = (placed(schedule, ranks, many, chunks) for many in (2 * ranks, 2 * ranks + micro_batches))
    ends = [max(lane[-1].end for lane in lanes) for lanes in (before, after)]
    busy = [sum(one.end - one.start for one in lanes[0]) for lanes in (before, after)]
    return (ends[1] - ends[0]) / (busy[1] - busy[0]) - 1


def waited(lanes: Sequence[Sequence[Placed]]) -> float:
    """Return the idle time over the ideal time of a step, from the actions of all ranks."""
    ideal = sum(one.end - one.start for one in lanes[0])
    return max(lane[-1].end for lane in lanes) / ideal - 1


def _ready(kind: str, at: Place, i: int | None, last: int, done: Mapping[_Done, int]) -> int | None:
    """Return the time at which an action's inputs are there; None if they are not yet."""
    pipeline, stage = at
    if kind == "forward":
        return 0 if stage == 0 else done.get(("forward", Place(pipeline, stage - 1), i))
    if kind == "backward of weights":
        return 0  # its other half has run on the same rank
    before = ("forward", at, i) if stage == last else ("backward", Place(pipeline, stage + 1), i)
    return done.get(before)
