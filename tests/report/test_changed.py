"""Flags that a list of changes comes to."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.inputs.options import check_options
from memcalc.report.changed import changed, shown


def flags_of(given: dict[str, Any], *rungs: dict[str, Any]) -> str | None:
    report = memcalc.estimate("llama-7b", **given)
    assert report.given is not None
    after = changed(check_options(report.given), report.setup, report.model, rungs)
    if after is None:
        return None
    assert memcalc.estimate("llama-7b", **given | dict(after.flags)).setup == after.setup
    return shown(after.flags)


@pytest.mark.parametrize(
    ("given", "rung", "flags"),
    [
        pytest.param({"gpus": 8}, {"engine": "deepspeed", "zero": 3}, "--zero 3", id="a default engine is not named"),
        pytest.param(
            {"gpus": 8, "engine": "ddp"},
            {"engine": "deepspeed", "zero": 3},
            "--engine deepspeed --zero 3",
            id="a given one is",
        ),
        pytest.param(
            {"gpus": 8, "zero": 3},
            {"cp": 2},
            "--engine deepspeed --cp 2 --global-batch-size 8",
            id="the engine stays, and the sequences",
        ),
        pytest.param(
            {"gpus": 8, "zero": 3, "global_batch_size": 8, "engine": "deepspeed"}, {"cp": 2}, "--cp 2", id="given so"
        ),
        pytest.param(
            {"gpus": 8, "micro_batch_size": 4},
            {"micro_batch_size": 2},
            "--micro-batch-size 2 --global-batch-size 32",
            id="more micro-batches",
        ),
        pytest.param(
            {"gpus": 8, "dp": 8, "global_batch_size": 24},
            {"gpus": 16},
            "--gpus 16 --dp 16 --global-batch-size 32",
            id="more GPUs than sequences go round",
        ),
        pytest.param(
            {"gpus": 8, "zero": 3, "optimizer_implementation": "foreach"},
            {"optimizer": "adafactor"},
            "--optimizer adafactor",
            id="an implementation that the other optimizer has",
        ),
        pytest.param(
            {"gpus": 8, "zero": 3, "optimizer_implementation": "fused"},
            {"optimizer": "adafactor"},
            "--optimizer adafactor --optimizer-implementation for-loop",
            id="one that it has not",
        ),
        pytest.param(
            {"gpus": 8, "tp": 2, "sequence_parallel": False},
            {"sequence_parallel": True},
            "--sequence-parallel",
            id="a switch that goes on",
        ),
        pytest.param(
            {"gpus": 8, "tp": 2},
            {"attention_mask_in_dataloader": False},
            "--no-attention-mask-in-dataloader",
            id="a switch that goes off",
        ),
        pytest.param({"gpus": 8}, {"tp": 2}, None, id="another engine only where it is named"),
        pytest.param({"gpus": 8, "zero": 3}, {"zero": 3}, None, id="what it is"),
        pytest.param({"gpus": 8, "zero": 3}, {"tp": 16}, None, id="more slices than GPUs"),
    ],
)
def test_flags(given: dict[str, Any], rung: dict[str, Any], flags: str | None) -> None:
    assert flags_of(given, rung) == flags


def test_several_changes_are_one_command() -> None:
    rungs = {"recompute": "full"}, {"gpus": 16}, {"optimizer": "adamw-8bit"}
    assert flags_of({"gpus": 8, "zero": 3}, *rungs) == "--recompute full --gpus 16 --optimizer adamw-8bit"
