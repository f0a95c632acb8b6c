"""Setups with a schedule that has a file: what is refused, which rows are there twice or in versions, and other views."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from command import here

import memcalc
from memcalc.estimation.report import Report
from memcalc.pipelining.schedules import NAMES, schedule_of
from memcalc.planning.layouts import LIMITS, Space
from memcalc.report.notes import notes
from memcalc.report.pipeline_lines import pipeline_lines

SETUP: dict[str, Any] = {"engine": "fsdp2", "zero": 2, "gpus": 8, "pp": 4, "global_batch_size": 16, "seq_len": 512}

MODEL = memcalc.load_model("llama-7b")


@cache
def report_of(schedule: str, **options: Any) -> Report:
    return memcalc.estimate(MODEL, **{**SETUP, "schedule": schedule, **options})


def total_of(report: Report, component: str) -> int:
    """The bytes of a component on all ranks together."""
    return sum(one.total(component) for one in report.each_rank())


@pytest.mark.parametrize("schedule", NAMES)
def test_all_stages_together_have_the_model_as_often_as_the_schedule_says(schedule: str) -> None:
    once = total_of(report_of("gpipe"), "parameters")
    copies = 2 if schedule_of(schedule).placement == "both ways" else 1
    report = report_of(schedule)
    own = sum(
        item.nbytes for one in report.each_rank() for item in one.items
        if item.component == "parameters" and "older version" not in item.name
    )  # fmt: skip
    assert own == copies * once


@pytest.mark.parametrize(("schedule", "extra"), [("pipedream", (3, 2, 1, 0)), ("pipedream-2bw", (1, 1, 1, 1))])
def test_older_versions_are_rows_of_the_weights(schedule: str, extra: tuple[int, ...]) -> None:
    """In bf16, half of the fp32 shards; the paper names them."""
    for one, count in zip(report_of(schedule).each_rank(), extra, strict=True):
        older = [item for item in one.items if "older version" in item.name]
        newest = sum(item.nbytes for item in one.items if item.component == "parameters") - sum(i.nbytes for i in older)
        assert 2 * sum(item.nbytes for item in older) == count * newest
        assert all("PipeDream" in item.source and item.basis == "modelled" for item in older)


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
def test_both_copies_of_a_stage_sum_their_gradients(schedule: str) -> None:
    """Shards in fp32, all of the rank's weights once a step."""
    for one in report_of(schedule).each_rank():
        sums = [c for c in one.collectives if "both copies" in c.name]
        assert all((c.axis, c.collective, c.group_size) == ("dp", "all_reduce", 2) for c in sums)
        assert sum(c.payload for c in sums) == one.total("parameters")


def test_pipedream_reduces_with_every_micro_batch() -> None:
    (each, many) = (
        sum(
            c.payload
            for c in report_of("pipedream", global_batch_size=batch).collectives
            if c.collective == "reduce_scatter"
        )
        for batch in (2, 16)
    )
    assert many == 8 * each


@pytest.mark.parametrize("batch", [8, 16, 48])
def test_2bw_gathers_the_older_version_where_two_batches_meet(batch: int) -> None:
    """Stage 0 of 4 has three micro-batches of the next batch forwarded between backwards of this one: each change of the version
    is a gather, besides the first one of a step."""
    report = report_of("pipedream-2bw", global_batch_size=batch, pp_rank=0)
    (outside,) = (c for c in report.collectives if c.collective == "all_gather" and "outside" in c.name)
    assert outside.calls == 1 + 2 * 3


def test_messages_are_those_of_the_stages_boundaries() -> None:
    """A V has one boundary less to send over: the last rank has both sides of it."""
    for schedule, boundaries in (("naive", 3), ("zbv", 6), ("chimera", 3), ("pipedream", 3)):
        report = report_of(schedule, global_batch_size=32)
        calls = sum(c.calls for one in report.each_rank() for c in one.collectives if c.axis == "pp")
        assert calls == 2 * 16 * boundaries


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "zbv", "zero": 3}, "--schedule zbv: with --zero 3, the default of fsdp2, torch takes a stage's"),
    (
        {"schedule": "dualpipe", "recompute": "full", "global_batch_size": 64},
        "--recompute full: with schedule dualpipe",
    ),
    ({"schedule": "dualpipe"}, "--schedule dualpipe: DualPipe needs an even number of micro-batches, 16 or more"),
    (
        {"schedule": "dualpipev", "global_batch_size": 14},
        "--schedule dualpipev: torch's ScheduleDualPipeV needs 8 or more",
    ),
    (
        {"schedule": "chimera", "gpus": 6, "pp": 3},
        "--schedule chimera: two pipelines in opposite directions need an even",
    ),
    ({"schedule": "chimera", "global_batch_size": 6}, "--schedule chimera: half of the micro-batches go each way"),
    ({"schedule": "pipedream-2bw", "global_batch_size": 6}, "--schedule pipedream-2bw: two versions are enough for 4"),
    ({"schedule": "pipedream", "gpus": 16, "tp": 2}, "--tp 2: with schedule pipedream, which updates weights while"),
    ({"schedule": "zbv", "virtual_stages": 3}, "--virtual-stages 3: schedule zbv has 2 model chunks a rank"),
    ({"schedule": "naive", "virtual_stages": 2}, "--virtual-stages 2: schedule naive has 1 model chunk a rank"),
    ({"schedule": "zbv", "first_stage_layers": 2}, "--first-stage-layers 2: schedule zbv has two stages a rank"),
    ({"schedule": "zbv", "gpus": 64, "pp": 32}, "--pp 32 · virtual-stages 2 = 64: llama-7b: 32 layers do not make 64"),
    (
        {"schedule": "chimera", "engine": "megatron", "zero": 1},
        "--schedule chimera: Megatron-Core has no such schedule",
    ),
    (
        {"schedule": "zbv", "engine": "deepspeed", "zero": 1},
        "--schedule zbv: DeepSpeed's pipeline has only this schedule",
    ),
    ({"schedule": "naive", "gpus": 2, "pp": 1}, "--schedule naive: needs a pipeline (--pp 2 or more)"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_refused(options: dict[str, Any], text: str) -> None:
    given = {**SETUP, "global_batch_size": 16, **options}
    if given["schedule"] == "dualpipe" and given["global_batch_size"] == 16:
        given |= {"gpus": 16, "pp": 8}
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate("llama-7b", **given)
    assert str(error.value).startswith(text) and "allowed: " in str(error.value)


def test_pipedream_flush_is_1f1b() -> None:
    report = report_of("pipedream-flush")
    assert report.setup == report_of("1f1b").setup and report.setup.schedule == "1f1b"


def test_two_chunks_can_be_said_and_left_out() -> None:
    assert report_of("zbv", virtual_stages=2).setup == report_of("zbv").setup
    assert report_of("chimera").setup.virtual_stages == 2


def test_a_note_says_whose_order_it_is() -> None:
    assert any("torch has no such schedule" in note for note in notes(report_of("chimera")))
    assert any("8 updates" in note for note in notes(report_of("pipedream")))
    assert not [note for note in notes(report_of("zbv")) if "schedule" in note]


def test_the_lines_of_a_pipeline() -> None:
    """Fourteen layers in eight stages of a V, or in four stages both ways."""
    for schedule, stages in (("zbv", 8), ("chimera", 4)):
        config = {"model_type": "llama", "num_hidden_layers": 14, "tie_word_embeddings": False}
        report = memcalc.estimate(config, **{**SETUP, "schedule": schedule})
        spread = next(str(line) for line in pipeline_lines(report) if "layers of each stage" in str(line))
        assert len(spread.split(",")) == stages


def test_a_plan_considers_them_only_if_asked() -> None:
    def schedules(**fixed: Any) -> set[str]:
        space = Space({"engine": "fsdp2", **fixed}, LIMITS, 32, 1, 32, 8)
        return {one.schedule for one in space.layouts("h100-80gb", 8) if one.pp > 1}

    assert schedules() == {"1f1b", "interleaved"}
    assert schedules(schedule="chimera") == {"chimera"}


@pytest.mark.slow
def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(
        capsys, "compare", "-m", "llama-7b", "--gpus", "8", "--pp", "4", "--zero", "2", "--seq-len", "512",
        "--global-batch-size", "16", "--schedule", "1f1b,chimera,zbv",
    )  # fmt: skip
    assert ran.status == 0 and all(name in ran.stdout for name in ("1f1b", "chimera", "zbv"))


@pytest.mark.slow
def test_validate_runs_one_model_that_is_updated_behind_its_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--gpus", "8", "--pp", "4", "--engine", "fsdp2", "--zero", "2", "--global-batch-size", "16")
    for name in ("chimera", "dualpipe", "pipedream"):
        ran = here(capsys, "validate", "-m", "llama-7b", *options, "--schedule", name)
        assert ran.status == 2 and f"--schedule {name}: is not run by validate" in ran.stderr
