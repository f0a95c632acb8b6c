"""Orders against torch's own schedule objects: every action of every rank, what is in flight and what is sent."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as real

from memcalc.megatron import schedules as megatron
from memcalc.pipelining.orders import COMPUTES, Action, bubble, lowered, most_in_flight, order, placed, waited

CLASSES: dict[str, Any] = {
    "gpipe": real.ScheduleGPipe,
    "1f1b": real.Schedule1F1B,
    "interleaved": real.ScheduleInterleaved1F1B,
    "zero-bubble": real.ScheduleInterleavedZeroBubble,
}
KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward of inputs",
    "BACKWARD_WEIGHT": "backward of weights",
    "SEND_F": "send forward",
    "SEND_B": "send backward",
    "UNSHARD": "unshard",
    "RESHARD": "reshard",
    "REDUCE_GRAD": "reduce",
}


def real_schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> Any:
    """torch's schedule as rank 0 makes it: it has the order of all ranks."""
    stages: list[Any] = [
        SimpleNamespace(
            num_stages=ranks * chunks, group_size=ranks, group_rank=0, stage_index=ranks * i, submod=None, is_last=False
        )
        for i in range(chunks)
    ]
    of_one = name in ("gpipe", "1f1b")
    return CLASSES[name](stages[0] if of_one else stages, micro_batches, loss_fn=print)


class Recorder:
    """A stage that notes what a schedule does with it. Of ScheduleGPipe and Schedule1F1B the list of actions is for drawings
    alone (the last rank's of Schedule1F1B begins with micro-batch 1); they run without it."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = rank, ranks, ranks, rank
        self.is_last = rank == ranks - 1
        self.ran: list[Action] = []
        self.sent: list[str] = []

    def forward_one_chunk(self, i: int, *rest: Any, **named: Any) -> int:
        self.ran.append(Action("forward", 0, i))
        return i

    def backward_one_chunk(self, i: int, **named: Any) -> None:
        self.ran.append(Action("backward", 0, i))

    def get_fwd_send_ops(self, i: int) -> list[Any]:
        self.sent += [] if self.is_last else ["SEND_F"]
        return []

    def get_bwd_send_ops(self, i: int) -> list[Any]:
        self.sent += [] if self.stage_index == 0 else ["SEND_B"]
        return []

    def get_fwd_recv_ops(self, i: int) -> list[Any]:
        return []

    get_bwd_recv_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, factor: int) -> None: ...


def recorded(name: str, rank: int, ranks: int, micro_batches: int) -> Recorder:
    """What one of the schedules of a single stage makes a rank do."""
    stage = Recorder(rank, ranks)
    schedule = CLASSES[name](stage, micro_batches, loss_fn=lambda *_: None)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches(target_mbs=[None] * micro_batches)
    return stage


def real_list(schedule: Any, rank: int, ranks: int) -> list[Action]:
    """What the runtime goes through, without what it receives."""
    return [
        Action(KINDS[a.computation_type.name], (a.stage_index - rank) // ranks, a.microbatch_index)  # type: ignore[arg-type]
        for a in schedule.pipeline_order_with_comms[rank]
        if a.computation_type.name in KINDS
    ]


def real_order(schedule: Any, name: str, rank: int, ranks: int) -> list[Action]:
    if name in ("gpipe", "1f1b"):
        return recorded(name, rank, ranks, schedule._n_microbatches).ran
    return [action for action in real_list(schedule, rank, ranks) if action.kind in COMPUTES]


def real_sends(schedule: Any, name: str, rank: int, ranks: int) -> list[str]:
    if name in ("gpipe", "1f1b"):
        return recorded(name, rank, ranks, schedule._n_microbatches).sent
    names = [a.computation_type.name for a in schedule.pipeline_order_with_comms[rank]]
    return [name for name in names if name in ("SEND_F", "SEND_B")]


SIZES = [
    (schedule, ranks, micro_batches, chunks)
    for schedule in CLASSES
    for ranks in (2, 4, 8)
    for micro_batches in (1, 2, 3, 4, 5, 8, 10, 16, 24)
    for chunks in ((1,) if schedule in ("gpipe", "1f1b") else (1, 2, 3))
]
CASES = pytest.mark.parametrize(("schedule", "ranks", "micro_batches", "chunks"), SIZES)


@CASES
def test_every_action(schedule: str, ranks: int, micro_batches: int, chunks: int) -> None:
    try:
        theirs = real_schedule(schedule, ranks, micro_batches, chunks)
    except ValueError:
        with pytest.raises(ValueError, match="micro-batches"):
            order(schedule, 0, ranks, micro_batches, chunks)
        return
    for rank in range(ranks):
        assert order(schedule, rank, ranks, micro_batches, chunks) == real_order(theirs, schedule, rank, ranks)


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
@pytest.mark.parametrize(("ranks", "micro_batches", "chunks"), [(2, 4, 1), (2, 3, 2), (4, 10, 3), (4, 8, 4), (2, 8, 5)])
def test_what_the_runtime_gathers_reduces_and_sends(schedule: str, ranks: int, micro_batches: int, chunks: int) -> None:
    theirs = real_schedule(schedule, ranks, micro_batches, chunks)
    for rank in range(ranks):
        actions = order(schedule, rank, ranks, micro_batches, chunks)
        assert lowered(actions, rank, ranks, micro_batches, chunks) == real_list(theirs, rank, ranks)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("chunks", [2, 3])
def test_as_much_is_in_flight_as_in_megatron(schedule: str, ranks: int, rounds: int, chunks: int) -> None:
    """With micro-batches that divide by the ranks, which Megatron's interleaving asks for."""
    chunks = chunks if schedule == "interleaved" else 1
    m = rounds * ranks
    theirs = real_schedule(schedule, ranks, m, chunks)
    for rank in range(ranks):
        states = megatron.states(schedule, rank, ranks, m, chunks)
        megatrons = max(sum(state.in_flight) + 1 for state in states if state.kind == "forward")
        assert most_in_flight(real_order(theirs, schedule, rank, ranks)) == megatrons


@CASES
def test_sends(schedule: str, ranks: int, micro_batches: int, chunks: int) -> None:
    """Twice over every boundary for each micro-batch, whatever the schedule: a forward from the rank before it, a backward
    from the rank behind it."""
    try:
        theirs = real_schedule(schedule, ranks, micro_batches, chunks)
    except ValueError:
        return
    total = 0
    for rank in range(ranks):
        sent = real_sends(theirs, schedule, rank, ranks)
        forwards = sum(stage != ranks * chunks - 1 for stage in range(rank, ranks * chunks, ranks))
        backwards = sum(stage != 0 for stage in range(rank, ranks * chunks, ranks))
        assert (sent.count("SEND_F"), sent.count("SEND_B")) == (forwards * micro_batches, backwards * micro_batches)
        total += len(sent)
    assert total == 2 * (ranks * chunks - 1) * micro_batches


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [8, 16])
def test_bubbles_are_those_of_the_papers(ranks: int, micro_batches: int) -> None:
    """(p-1)/m, a v-th of it with v chunks, a third with zero-bubble (arXiv 2104.04473, 2401.10241)."""
    expected = (ranks - 1) / micro_batches
    assert bubble("gpipe", ranks, micro_batches) == pytest.approx(expected)
    assert bubble("1f1b", ranks, micro_batches) == pytest.approx(expected)
    assert bubble("interleaved", ranks, micro_batches, 2) == pytest.approx(expected / 2)
    assert bubble("zero-bubble", ranks, micro_batches) == pytest.approx(expected / 3)


@CASES
def test_every_action_has_its_place(schedule: str, ranks: int, micro_batches: int, chunks: int) -> None:
    """In the rank's order, and not before its inputs are there."""
    try:
        lanes = placed(schedule, ranks, micro_batches, chunks)
    except ValueError:
        return
    lasts = {"forward": 1, "backward": 2, "backward of inputs": 1, "backward of weights": 1}
    ends: dict[tuple[str, int, int | None], int] = {}
    for rank, lane in enumerate(lanes):
        assert [one.action for one in lane] == order(schedule, rank, ranks, micro_batches, chunks)
        assert all(one.end - one.start == lasts[one.action.kind] for one in lane)
        assert all(one.end <= after.start for one, after in pairwise(lane))
        ends |= {(one.action.kind, one.action.chunk * ranks + rank, one.action.micro_batch): one.end for one in lane}
    for rank, lane in enumerate(lanes):
        clock = 0
        for (kind, chunk, i), start, end in lane:
            stage = chunk * ranks + rank
            before = ("forward", stage - 1) if kind == "forward" else (kind, stage + 1)
            if kind != "forward" and stage == ranks * chunks - 1:
                before = ("forward", stage)
            ready = 0 if kind == "backward of weights" else ends.get((*before, i), 0)
            assert start == max(clock, ready)
            clock = end
    assert bubble(schedule, ranks, micro_batches, chunks) == waited(lanes)
