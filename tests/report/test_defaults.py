"""What a report says of the engine and the precision that nobody asked for."""

from __future__ import annotations

import io
from typing import Any

import pytest
from command import LLAMA, check_refused, here

import memcalc
from memcalc.estimation.report import Report
from memcalc.report.defaults import ALONE, LAUNCHERS, default_lines
from memcalc.report.table import print_report

TRAINER = "HF Trainer with bf16=True is --engine ddp --precision bf16-autocast"
FSDP = "FSDP is --engine fsdp2 --zero 3"
DEEPSPEED = "DeepSpeed is --engine deepspeed --zero 2 (or 3)"
TRAINER_ALONE = "HF Trainer with bf16=True is --precision bf16-autocast"


def of(**options: Any) -> list[str]:
    return default_lines(memcalc.estimate(LLAMA, **options))


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            {"gpus": 8},
            ["by default: engine ddp, precision bf16-mixed", f"your launcher may differ: {TRAINER} · {FSDP} · {DEEPSPEED}"],
        ),
        (
            {},
            [
                "by default: engine none (plain PyTorch), precision bf16-mixed",
                f"your launcher may differ: {TRAINER_ALONE}",
            ],
        ),
        ({"gpus": 8, "precision": "fp32"}, ["by default: engine ddp", f"your launcher may differ: {FSDP} · {DEEPSPEED}"]),
        ({"gpus": 8, "engine": "ddp"}, ["by default: precision bf16-mixed",
                                        f"your launcher may differ: {TRAINER_ALONE}"]),
        ({"gpus": 8, "zero": 3}, ["by default: engine deepspeed, precision bf16-mixed",
                                  "your launcher may differ: FSDP is --engine fsdp2"]),
        ({"gpus": 8, "zero": 1}, ["by default: engine deepspeed, precision bf16-mixed"]),
        ({"gpus": 8, "engine": "fsdp2"}, ["by default: ZeRO 3, precision bf16-mixed"]),
        ({"gpus": 8, "engine": "deepspeed", "precision": "fp32"},
         ["by default: ZeRO 0", "your launcher may differ: DeepSpeed is --zero 2 (or 3)"]),
        ({"gpus": 8, "optimizer": "adafactor", "precision": "fp32"},
         ["by default: engine ddp", f"your launcher may differ: {DEEPSPEED}"]),
        ({"gpus": 8, "tp": 2, "precision": "fp32"}, ["by default: engine megatron", f"your launcher may differ: {FSDP}"]),
        ({"gpus": 8, "engine": "ddp", "precision": "bf16-mixed"}, []),
        ({"engine": "none", "precision": None}, ["by default: precision bf16-mixed",
                                                 f"your launcher may differ: {TRAINER_ALONE}"]),
    ],
    ids=str,
)  # fmt: skip
def test_only_what_nobody_gave_is_named(options: dict[str, Any], lines: list[str]) -> None:
    assert of(**options) == lines


def test_a_setup_that_was_resolved_from_nothing_has_no_defaults() -> None:
    report = memcalc.estimate(LLAMA, gpus=8)
    assert default_lines(Report(report.model, report.setup)) == []


def test_they_are_in_the_table_and_in_the_document() -> None:
    report = memcalc.estimate(LLAMA, gpus=8)
    file = io.StringIO()
    print_report(report, rows=False, file=file)
    shown = " ".join(file.getvalue().split("Memory per GPU")[0].split())
    for line in default_lines(report):
        assert line in shown
    assert report.to_dict()["notes"] == default_lines(report)


@pytest.mark.parametrize("gpus", [1, 8])
def test_what_is_named_is_estimated_as_named(gpus: int) -> None:
    for _, options, _ in ALONE if gpus == 1 else LAUNCHERS:
        setup = memcalc.estimate(LLAMA, gpus=gpus, **options).setup
        assert {name: getattr(setup, name) for name in options} == options


def test_a_bare_number_of_parameters_has_them_too() -> None:
    assert default_lines(memcalc.estimate(params="7B", gpus=8))[0] == "by default: engine ddp, precision bf16-mixed"


# --- stages


def test_fsdp2_alone_shards_all_it_can() -> None:
    assert memcalc.estimate(LLAMA, gpus=4, engine="fsdp2").phases == (
        memcalc.estimate(LLAMA, gpus=4, engine="fsdp2", zero=3).phases
    )
    with pytest.raises(memcalc.InputError, match="--zero 3"):
        memcalc.estimate(LLAMA, gpus=4, engine="fsdp2", zero=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--zero", "3"], ["--zero 3", "1 GPU", "--engine deepspeed --zero 3 or --engine fsdp2 --zero 3"]),
        (["--zero", "1", "--gpus", "1"], ["--zero 1", "1 GPU", "more --gpus, or --engine deepspeed --zero 1"]),
        (["--zero", "3", "--engine", "ddp"], ["--zero 3", "ddp shards nothing", "--engine deepspeed or fsdp2"]),
        (["--zero", "2", "--engine", "none"], ["--zero 2", "none shards nothing", "--engine deepspeed or fsdp2"]),
        (["--zero", "1", "--engine", "ddp", "--gpus", "2"], ["--zero 1", "allowed: 0, or --engine deepspeed"]),
    ],
)
def test_a_stage_that_shards_nothing_is_refused(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(here(capsys, "estimate", "-m", "gpt2", *arguments), *words)
    if "--engine" in arguments:  # without one, a bare size is that of the ZeRO paper's table
        check_refused(here(capsys, "estimate", "--params", "7B", *arguments), *words)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_an_engine_that_is_named_runs_on_one_gpu(engine: str) -> None:
    setup = memcalc.estimate(LLAMA, engine=engine, zero=3).setup
    assert (setup.engine, setup.zero, setup.gpus) == (engine, 3, 1)
