"""Schedules that have a file each: their orders against real ones, their bubbles and what is in flight against the papers'."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as real

from memcalc.inputs.options import CHOICES, TWO_CHUNKS
from memcalc.pipelining.actions import COMPUTES, Action
from memcalc.pipelining.clock import makespan
from memcalc.pipelining.orders import bubble, lowered, most_in_flight, order, placed, waited
from memcalc.pipelining.placement import place, stages
from memcalc.pipelining.schedules import NAMES, joined_of, placement_of, schedule_of, versions
from memcalc.pipelining.stashing import with_versions

OF_TORCH: dict[str, Any] = {"zbv": real.ScheduleZBVZeroBubble, "dualpipev": real.ScheduleDualPipeV}
KINDS = {
    "FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "backward of inputs",
    "BACKWARD_WEIGHT": "backward of weights", "SEND_F": "send forward", "SEND_B": "send backward",
    "UNSHARD": "unshard", "RESHARD": "reshard", "REDUCE_GRAD": "reduce",
}  # fmt: skip
RANKS = (1, 2, 3, 4, 5, 8)
MICRO_BATCHES = (1, 2, 3, 5, 6, 7, 8, 10, 13, 16, 20, 24)
SPANS = {"forward": 1, "backward": 2, "backward of inputs": 1, "backward of weights": 1}


def test_every_schedule_has_a_file_and_its_name() -> None:
    for name in NAMES:
        schedule = schedule_of(name)
        assert schedule.name == name and name in CHOICES["schedule"]
        assert (schedule.chunks == 2) == (name in TWO_CHUNKS) == (schedule.placement != "in rounds")


def real_actions(name: str, rank: int, ranks: int, micro_batches: int) -> list[Any]:
    """What torch's runtime goes through, an overlapped pair as its two parts. Raises ValueError as torch does."""
    stages: list[Any] = [
        SimpleNamespace(
            num_stages=2 * ranks, group_size=ranks, group_rank=0, stage_index=index, submod=None, is_last=False
        )
        for index in (0, 2 * ranks - 1)
    ]
    schedule = OF_TORCH[name](stages, micro_batches, loss_fn=print)
    parts = [a.sub_actions or (a,) for a in schedule.pipeline_order_with_comms[rank]]
    return [a for part in parts for a in part if a.computation_type.name in KINDS]


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
def test_every_action_is_torchs(name: str, ranks: int, micro_batches: int) -> None:
    """The same computations with the same gathers, frees and reductions between them, and the same sends."""
    for rank in range(ranks):
        try:
            found = real_actions(name, rank, ranks, micro_batches)
        except ValueError:
            assert schedule_of(name).unfit(ranks, micro_batches) is not None
            return
        theirs = [Action(KINDS[a.computation_type.name], int(a.stage_index != rank), a.microbatch_index) for a in found]  # type: ignore[arg-type]
        own = order(name, rank, ranks, micro_batches, 2)
        ours = lowered(own, rank, ranks, micro_batches, 2, "in a V")
        assert own == [a for a in theirs if a.kind in COMPUTES]
        assert [a for a in ours if "send" not in a.kind] == [a for a in theirs if "send" not in a.kind]
        assert sorted(map(str, ours)) == sorted(map(str, theirs))  # a pair's sends come behind both of its parts
    assert schedule_of(name).unfit(ranks, micro_batches) is None


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 6), (3, 11), (4, 10)])
def test_pairs_overlap_where_torchs_do(ranks: int, micro_batches: int) -> None:
    stages: list[Any] = [
        SimpleNamespace(num_stages=2 * ranks, group_size=ranks, group_rank=0, stage_index=i, submod=None, is_last=False)
        for i in (0, 2 * ranks - 1)
    ]
    schedule = real.ScheduleDualPipeV(stages, micro_batches, loss_fn=print)
    for rank, joined in enumerate(joined_of("dualpipev", ranks, micro_batches)):
        theirs: list[int] = []
        place = 0
        for action in schedule.pipeline_order[rank]:
            if action is not None and action.sub_actions:
                theirs.append(place)
                place += 1
            place += 1
        assert sorted(joined) == theirs


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8, 13])
def test_dapples_policy_a_is_the_order_of_deepspeeds_train_schedule(ranks: int, micro_batches: int) -> None:
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    for rank in range(ranks):
        theirs = [
            "forward" if isinstance(command, ForwardPass) else "backward"
            for step in TrainSchedule(micro_batches, ranks, rank)
            for command in step
            if isinstance(command, (ForwardPass, BackwardPass))
        ]
        assert [action.kind for action in order("dapple", rank, ranks, micro_batches)] == theirs


CHIMERA_4_4 = (
    "0f 1f 0F 0B 1F 1B 0b 1b", "0f 0F 1f 1F 0B 0b 1B 1b", "0F 0f 1F 1f 0b 0B 1b 1B", "0F 1F 0f 0b 1f 1b 0B 1B",
)  # fmt: skip
"""Li and Hoefler 2021, figure 3, four stages and four micro-batches: f and b go down, F and B go up."""


def test_chimeras_order_is_that_of_figure_3() -> None:
    letters = {("forward", 0): "f", ("forward", 1): "F", ("backward", 0): "b", ("backward", 1): "B"}
    for rank, drawn in enumerate(CHIMERA_4_4):
        ours = [f"{i}{letters[kind, chunk]}" for kind, chunk, i in order("chimera", rank, 4, 4)]
        assert " ".join(ours) == drawn


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_chimera_against_its_paper(ranks: int) -> None:
    """arXiv 2107.06925, section 3.1: of the step (D-2)/(3N/2+D-2) where a backward takes two forwards and N = D; table 2:
    (D-2)/(2N+D-2) where both take equally long, for each multiple of D; between D/2+1 and D micro-batches in flight."""
    idle = bubble("chimera", ranks, ranks, 2)
    assert idle / (1 + idle) == pytest.approx((ranks - 2) / (3 * ranks / 2 + ranks - 2))
    for many in (ranks, 2 * ranks, 5 * ranks):
        steps = [[(kind, chunk) for kind, chunk, _ in order("chimera", rank, ranks, many)] for rank in range(ranks)]
        whole = makespan(steps, 2, lambda rank, chunk, kind: 1.0, "both ways")
        assert 1 - 2 * many / whole == pytest.approx((ranks - 2) / (2 * many + ranks - 2))
    in_flight = [most_in_flight(order("chimera", rank, ranks, 2 * ranks)) for rank in range(ranks)]
    assert (min(in_flight), max(in_flight)) == (ranks // 2 + 1, ranks)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("more", [0, 2, 8])
def test_dualpipe_against_its_table(ranks: int, more: int) -> None:
    """deepseek-ai/DualPipe, README: (PP/2-1)(F&B + B - 3W) idle and PP+1 in flight, for DualPipe with PP ranks and DualPipeV
    with half as many; here F = W = 1, B = 2 and F&B = F + B."""
    many = 2 * ranks + more
    for name, of, chunk_micro_batches in (("dualpipe", ranks, many), ("dualpipev", ranks // 2, many // 2)):
        lanes = placed(name, of, chunk_micro_batches, 2)
        end = max(lane[-1].end for lane in lanes)
        assert {end - sum(one.end - one.start for one in lane) for lane in lanes} == {(ranks // 2 - 1) * (3 + 2 - 3)}
        assert {most_in_flight([one.action for one in lane]) for lane in lanes} == {ranks + 1}


def test_the_second_half_of_dualpipes_ranks_does_what_the_first_half_does_the_other_way() -> None:
    for rank in range(3):
        other = [action._replace(chunk=1 - action.chunk) for action in order("dualpipe", 5 - rank, 6, 14)]
        assert order("dualpipe", rank, 6, 14) == other


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_zbv_has_no_idle_time_within_a_ranks_own_span(ranks: int) -> None:
    """Qi et al. 2023, arXiv 2401.10241, section 6, where a forward and both halves of a backward take equally long; at most
    2p chunks of a half of 1F1B's stages are in flight: as much memory as 1F1B."""
    for lane in placed("zbv", ranks, 3 * ranks, 2):
        assert lane[-1].end - lane[0].start == sum(one.end - one.start for one in lane)
        assert most_in_flight([one.action for one in lane]) == 2 * ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_pipedream_keeps_a_version_for_each_micro_batch_in_flight(ranks: int) -> None:
    """Narayanan et al. 2019, section 3.3: p - i versions at stage i; 2021, arXiv 2006.09503, section 3.1: two at each."""
    for many in (1, ranks, 3 * ranks):
        kept = [versions(schedule_of("pipedream"), rank, ranks, many) for rank in range(ranks)]
        assert kept == [ranks - rank for rank in range(ranks)]
    for many in (ranks, 3 * ranks + 1):
        assert {versions(schedule_of("pipedream-2bw"), rank, ranks, many) for rank in range(ranks)} == {2}
    assert versions(schedule_of("dapple"), 0, ranks, 8) == 1


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("micro_batches", [4, 7])
def test_a_pipeline_that_is_never_emptied_has_no_bubble(name: str, micro_batches: int) -> None:
    assert bubble(name, 4, micro_batches) == 0
    assert waited(placed(name, 4, micro_batches)) > 0  # from its first step on


def test_a_backward_has_the_version_of_its_forward() -> None:
    """Stage 0 of 3 with three versions: each forward after the first ones sees one more update."""
    wanted = [
        "unshard", "f0", "f1", "f2", "b0", "reduce", "update", "unshard", "f3", "reshard", "unshard", "b1", "reduce", "update",
        "unshard", "b2", "reduce", "update", "unshard", "b3", "reduce", "update",
    ]  # fmt: skip
    found = with_versions(order("pipedream", 0, 3, 4), "pipedream", 0, 3, 4)
    shown = [a.kind if a.micro_batch is None else f"{a.kind[0]}{a.micro_batch}" for a in found if "send" not in a.kind]
    assert shown == wanted


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_naive_model_parallelism_has_one_rank_at_work(ranks: int) -> None:
    """Each micro-batch takes p times as long as one rank computes for it (Huang et al. 2019, figure 2b)."""
    assert bubble("naive", ranks, 5) == pytest.approx(ranks - 1)
    assert {most_in_flight(order("naive", rank, ranks, 5)) for rank in range(ranks)} == {1}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_dapples_warmups(ranks: int) -> None:
    """Fan et al. 2021, section 3: K = S - i and K = 2(S - i) - 1 forwards before the first backward, no more than there are."""
    for name, warmups in (
        ("dapple", [ranks - i for i in range(ranks)]), ("dapple-b", [2 * (ranks - i) - 1 for i in range(ranks)]),
    ):  # fmt: skip
        for many in (3, 40):
            found = [[a.kind for a in order(name, rank, ranks, many)].index("backward") for rank in range(ranks)]
            assert found == [min(warmup, many) for warmup in warmups]
        assert bubble(name, ranks, 16) == pytest.approx((ranks - 1) / 16)


SIZES = [
    (name, ranks, many)
    for name in NAMES
    for ranks in (2, 3, 4, 6)
    for many in (2, 4, 7, 12, 16)
    if schedule_of(name).unfit(ranks, many) is None
]


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SIZES)
def test_every_action_has_its_place_in_time(name: str, ranks: int, micro_batches: int) -> None:
    """In the rank's order, after its inputs are there, and each stage has every micro-batch of its pipeline once."""
    chunks, placement = schedule_of(name).chunks, placement_of(name)
    last = stages(placement, ranks, chunks) - 1
    lanes = placed(name, ranks, micro_batches, chunks)
    ends: dict[tuple[str, Any, int | None], int] = {}
    for rank, lane in enumerate(lanes):
        assert [one.action for one in lane] == order(name, rank, ranks, micro_batches, chunks)
        assert all(one.end - one.start == SPANS[one.action.kind] for one in lane)
        assert all(one.end <= after.start for one, after in pairwise(lane))
        for one in lane:
            kind = "backward" if one.action.kind == "backward of inputs" else one.action.kind
            key = kind, place(placement, rank, ranks, one.action.chunk), one.action.micro_batch
            assert key not in ends
            ends[key] = one.end
    done = sum(kind == "forward" for kind, _, _ in ends)
    assert done == (last + 1) * micro_batches  # of both copies together where there are two
    for rank, lane in enumerate(lanes):
        for (kind, chunk, i), start, _ in lane:
            at = place(placement, rank, ranks, chunk)
            if kind == "forward" and at.stage:
                assert ends["forward", at._replace(stage=at.stage - 1), i] <= start
            elif kind in ("backward", "backward of inputs"):
                before = ("forward", at, i) if at.stage == last else ("backward", at._replace(stage=at.stage + 1), i)
                assert ends[before] <= start


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SIZES)
def test_the_clock_and_the_picture_agree(name: str, ranks: int, micro_batches: int) -> None:
    chunks = schedule_of(name).chunks
    steps = [[(kind, chunk) for kind, chunk, _ in order(name, rank, ranks, micro_batches)] for rank in range(ranks)]
    times = dict(SPANS)
    whole = makespan(
        steps, chunks, lambda rank, chunk, kind: times[kind], placement_of(name), joined_of(name, ranks, micro_batches)
    )
    assert whole == max(lane[-1].end for lane in placed(name, ranks, micro_batches, chunks))
