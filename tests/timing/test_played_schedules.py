"""The time of schedules that have a file each: played with every stage's own time."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.estimation.report import Report
from memcalc.pipelining.orders import bubble
from memcalc.pipelining.schedules import NAMES, of_each_chunk, schedule_of, updates_of
from memcalc.setup.setup import Setup
from memcalc.timing.schedule import Turn, seconds_of_passes
from memcalc.timing.step import StepTime, step_time

BASE = memcalc.estimate("gpt2").setup
SIZES = [
    (name, ranks, many)
    for name in NAMES
    for ranks in (2, 4)
    for many in (4, 8, 12, 18, 46)
    if schedule_of(name).unfit(ranks, many) is None
]


def setup_of(name: str, ranks: int, micro_batches: int) -> Setup:
    chunks = schedule_of(name).chunks
    return BASE._replace(
        pp=ranks, dp=1, global_batch_size=micro_batches, schedule=name, virtual_stages=chunks, engine="fsdp2"
    )


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SIZES)
def test_equal_stages_wait_as_long_as_the_bubble(name: str, ranks: int, micro_batches: int) -> None:
    """Also of more micro-batches than are played one by one."""
    chunks = schedule_of(name).chunks
    setup = setup_of(name, ranks, micro_batches)
    busy = chunks * of_each_chunk(name, micro_batches) * 3.0
    found = seconds_of_passes(setup, [[Turn(1.0, 2.0)] * chunks] * ranks)
    assert found / busy - 1 == pytest.approx(bubble(name, ranks, micro_batches, chunks), abs=1e-9)


def test_the_slowest_stage_paces_a_pipeline_that_is_never_emptied() -> None:
    """Stage 1 takes 2 + 4 seconds for each micro-batch, and nothing else counts."""
    turns = [[Turn(1, 2)], [Turn(2, 4)], [Turn(1, 2)]]
    for name in ("pipedream", "pipedream-2bw"):
        assert seconds_of_passes(setup_of(name, 3, 10), turns) == pytest.approx(10 * 6)


def test_a_step_of_pipedream_has_an_update_for_each_micro_batch() -> None:
    given = {
        "engine": "fsdp2",
        "zero": 2,
        "gpus": 4,
        "pp": 4,
        "global_batch_size": 8,
        "gpu": "h100-80gb",
        "seq_len": 512,
    }
    one, eight = (
        _optimizer(memcalc.estimate("llama-7b", schedule=name, **given)) for name in ("pipedream-2bw", "pipedream")
    )
    assert updates_of("pipedream", 8) == 8 and updates_of("pipedream-2bw", 8) == 1
    assert eight == pytest.approx(8 * one)


def _optimizer(report: Report) -> float:
    time = step_time(report)
    assert isinstance(time, StepTime)
    return time.breakdown["optimizer"]


def test_both_copies_of_a_stage_have_half_of_the_work_each() -> None:
    """So a rank computes as long as with one stage and all micro-batches, in equal stages."""
    given = {
        "engine": "fsdp2",
        "zero": 2,
        "gpus": 4,
        "pp": 4,
        "global_batch_size": 8,
        "gpu": "h100-80gb",
        "seq_len": 512,
    }
    times = {name: memcalc.estimate("llama-7b", schedule=name, **given) for name in ("dapple", "chimera")}
    each = {name: sum(rank.flops["total"] for rank in report.each_rank()) for name, report in times.items()}
    assert each["dapple"] == each["chimera"]
