"""What others have measured on GPUs and published, and what `memcalc validate` has recorded, beside today's estimates: rows for
docs/accuracy.md and the READMEs."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import measured

import memcalc
from memcalc.validate.recording import read_record
from memcalc.validate.records import rows_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from megatron_functional_tests import functional_tests
from published_runs import RESERVED_RUNS, SIMUMAX_RUNS
from published_step_times import published_times

TRAINER = Path(__file__).resolve().parent.parent / "tests" / "published_measurements.json"


class Compared(NamedTuple):
    """A run of HF's SFTTrainer that fms-acceleration has published, and its estimate."""

    case: dict[str, Any]
    report: memcalc.Report

    @property
    def measured(self) -> bool:
        return "allocated" in self.case["expect"]

    @property
    def right(self) -> bool:
        """Whether the verdict is what happened."""
        return self.report.fits == self.case["expect"]["fits"]

    @property
    def has_room(self) -> bool:
        """Whether the run fits without segments that the allocator has to give back."""
        return self.report.verdict is not None and self.report.verdict.answer == "fits"

    def error(self, name: str) -> float:
        """The estimate's error against a measured number, as a share of it."""
        return getattr(self.report, name) / self.case["expect"][name] - 1


@cache
def trainer_runs() -> tuple[Compared, ...]:
    """Every published run of the Trainer with its estimate."""
    cases = json.loads(TRAINER.read_text(encoding="utf-8"))
    models = {of: memcalc.load_model(json.loads(of)) for of in {json.dumps(case["setup"]["model"]) for case in cases}}
    return tuple(
        Compared(
            case,
            memcalc.estimate(
                models[json.dumps(case["setup"]["model"])], **{k: v for k, v in case["setup"].items() if k != "model"}
            ),
        )
        for case in cases
    )


class Evidence(NamedTuple):
    """A line of the READMEs: who measured how many runs of what, and how far the estimates are off."""

    who: str
    where: str
    number: str
    errors: tuple[float, ...]


@cache
def evidence() -> tuple[Evidence, ...]:
    """The lines, without verdicts."""
    runs = [run for run in trainer_runs() if run.measured]
    room = [run for run in runs if run.has_room]
    allocated = "`max_memory_allocated`"
    return (
        Evidence("fms-acceleration (IBM)", "HF SFTTrainer, 1–2 A100", allocated, _errors(runs, "allocated")),
        Evidence("fms-acceleration (IBM)", "HF SFTTrainer, 1–2 A100", "nvidia-smi", _errors(room, "device")),
        Evidence("SimuMax (Moore Threads)", "Megatron, 8 B200", allocated, _published(SIMUMAX_RUNS, "allocated")),
        Evidence(
            "SimuMax (Moore Threads)", "Megatron, 8 B200", "`max_memory_reserved`", _published(SIMUMAX_RUNS, "reserved")
        ),
        Evidence("Megatron-LM (NVIDIA)", "Megatron, 8 H100 or A100", allocated, functional_test_errors()),
        Evidence(
            "torchtitan (PyTorch)",
            "FSDP2, 8 and 128 H100",
            "`max_memory_reserved`",
            _published(RESERVED_RUNS, "reserved"),
        ),
        *(Evidence(OWN, _engines(), number, _recorded(row)) for row, number in _ROWS.items()),
    )


@cache
def functional_test_errors() -> tuple[float, ...]:
    """The errors of Megatron-LM's functional tests, in their order."""
    return tuple(run.error() for run in functional_tests())


OWN = "memcalc (tests/measured)"
_ROWS = {"allocated": "`max_memory_allocated`", "reserved": "`max_memory_reserved`", "device": "nvidia-smi"}
_TITLES = {"none": "PyTorch", "ddp": "DDP", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}


@cache
def _cases() -> tuple[Mapping[str, Any], ...]:
    """The cases of all records that were measured."""
    cases = (made for record in measured.records() for made in read_record(record))
    return tuple(made for made in cases if made["outcome"] == "measured")


def _engines() -> str:
    """The engines and GPUs of the records."""
    engines = dict.fromkeys(_TITLES[made["setup"]["engine"]] for made in _cases())
    gpus = dict.fromkeys(made["environment"]["gpu"].removeprefix("NVIDIA ") for made in _cases())
    return f"{', '.join(engines)}; 1 {' or '.join(gpus)}"


def _recorded(row: str) -> tuple[float, ...]:
    return tuple(one.compared.error for made in _cases() for one in rows_of(made) if one.compared.name == row)


def _errors(runs: Iterable[Compared], name: str) -> tuple[float, ...]:
    return tuple(run.error(name) for run in runs)


def _published(runs: Sequence[Any], name: str) -> tuple[float, ...]:
    """The errors of runs whose numbers are printed in GiB."""
    return tuple(getattr(run.estimate(), name) / 2**30 / getattr(run, name) - 1 for run in runs)


def largest(errors: Iterable[float]) -> str:
    """The error that is farthest from zero, in percent."""
    return f"{100 * max(errors, key=abs):+.2f} %"


def median(errors: Iterable[float]) -> str:
    """The median of the errors' sizes, in percent."""
    return f"{100 * statistics.median(map(abs, errors)):.2f} %"


ENGLISH = {
    "head": "| measured by | what ran | number | runs | median error | largest error |",
    "verdicts": "Of the {runs} published runs of the Trainer, {full} ran out of memory. `fits` is right for {right} of {runs}.",
    "room": "The errors of nvidia-smi are those of the {room} runs with memory to spare: a full GPU frees cached memory.",
    "times": "Step times: the mean error of {runs} published runs is {mean}, the largest {worst} (on {gpu}).\n"
    "{held} of these runs, of {who}, were not used to set the speeds of kernels; their mean error is {held_mean}.",
}
CHINESE = {
    "head": "| 测量者 | 运行内容 | 数值 | 次数 | 误差中位数 | 最大误差 |",
    "verdicts": "Trainer 的 {runs} 次公开运行中，有 {full} 次显存不足；`fits` 在 {runs} 次中有 {right} 次正确。",
    "room": "nvidia-smi 一行只统计显存有余量的 {room} 次运行；显存占满时，分配器会归还缓存的显存段。",
    "times": "训练步时间：{runs} 次公开运行的平均误差为 {mean}，最大误差为 {worst}（{gpu}）。\n"
    "其中 {who} 的 {held} 次运行没有用来设定 kernel 的速度，它们的平均误差为 {held_mean}。",
}


def table(words: dict[str, str] = ENGLISH) -> str:
    """The table of evidence with the sentences under it."""
    runs = trainer_runs()
    counts = {
        "runs": len(runs),
        "full": sum(not run.case["expect"]["fits"] for run in runs),
        "right": sum(run.right for run in runs),
        "room": sum(run.measured and run.has_room for run in runs),
    }
    lines = [words["head"], "|---|---|---|---|---|---|"]
    lines += [
        f"| {e.who} | {e.where} | {e.number} | {len(e.errors)} | {median(e.errors)} | {largest(e.errors)} |"
        for e in evidence()
    ]
    return "\n".join([*lines, "", words["verdicts"].format(**counts), words["room"].format(**counts), times(words)])


HELD_OUT = "fms-acceleration (IBM)"
"""Whose step times were not used for the shares of a GPU's speed (docs/step-time.md)."""


def times(words: dict[str, str] = ENGLISH) -> str:
    """Two sentences on the published step times."""
    rows = published_times()
    held = [row for row in rows if row.measured_by == HELD_OUT]
    worst = max(rows, key=lambda row: abs(row.error))
    return words["times"].format(
        runs=len(rows),
        mean=mean(row.error for row in rows),
        worst=f"{100 * worst.error:+.1f} %",
        gpu=str(worst.setup["gpu"]).upper(),
        held=len(held),
        who=HELD_OUT,
        held_mean=mean(row.error for row in held),
    )


def mean(errors: Iterable[float]) -> str:
    """The mean of the errors' sizes, in percent."""
    return f"{100 * statistics.mean(map(abs, errors)):.1f} %"


TRAINER_HEAD = """## HF Trainer on A100s

The project fms-acceleration (foundation-model-stack, by IBM) has published a benchmark of HF's SFTTrainer on one and two A100
80GB: packed sequences of 4096 tokens, flash-attn 2, gradient checkpointing, AdamW. Two GPUs are FSDP1 there and are estimated as
FSDP2.
`allocated` is torch.cuda.max_memory_allocated, in bytes; `device` is what nvidia-smi showed. Where the verdict is *tight* the
GPU was full: the estimate of `device` is for a larger GPU, and on this one the allocator freed cached segments.

| run | GPUs | batch | precision | allocated, measured | memcalc | error | device, measured | error | verdict |
|---|---|---|---|---|---|---|---|---|---|
"""


def trainer_section() -> list[str]:
    """The runs of HF's Trainer for docs/accuracy.md."""
    lines = TRAINER_HEAD.splitlines()
    for run in trainer_runs():
        if not run.measured:
            continue
        setup, expect, verdict = run.case["setup"], run.case["expect"], run.report.verdict
        numbers = (
            f"{expect['allocated']:,} | {run.report.allocated:,} | {100 * run.error('allocated'):+.3f} % | "
            f"{expect['device']:,} | {100 * run.error('device'):+.1f} %"
        )
        name = run.case["id"].split("/")[1] + (", amp" if run.case["id"].endswith("/amp") else "")
        head = f"{name} | {setup['gpus']} | {setup['micro_batch_size']} | {setup['precision']}"
        lines.append(f"| {head} | {numbers} | {verdict.answer if verdict else ''} |")
    out = [run for run in trainer_runs() if not run.measured]
    names = sorted({run.case["id"].split("/")[1] for run in out})
    refused = sum(run.report.fits is False for run in out)
    return [
        *lines,
        "",
        f"{len(out)} more runs of the same benchmark, of {' and '.join(names)}, ran out of memory.",
        f"`fits` is false for {refused} of these {len(out)}. The source of each run is in tests/published_measurements.json.",
        "",
    ]
