"""DeepSpeed's own optimizers against what DeepSpeed 0.19.6 did, number by number: states, peaks, and every call's bytes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from engines.deepspeed.onebit_oracle import CASES, LLAMA, MODELS, RECORD, measured

import memcalc
from memcalc.estimation.report import Report
from memcalc.optimizers.of_deepspeed.compressed_allreduce import Compressed

RECORDED: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
PRECISIONS = {"fp32": "fp32", "fp16": "fp16-mixed", "bf16": "bf16-mixed"}
DTYPES = {"float32": ("fp32", 4), "uint8": ("uint8", 1), "float16": ("fp16", 2), "bfloat16": ("bf16", 2)}
STATES = {"worker_errors": "worker_error", "server_errors": "server_error", "lamb_coeffs": "lamb_coeff"}
"""DeepSpeed's names of what the optimizer keeps beside the states of its parameters."""


def named(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def ours(case: dict[str, Any]) -> Report:
    return memcalc.estimate(
        MODELS[case["model"]], engine="deepspeed", gpus=case["gpus"], precision=PRECISIONS[case["precision"]], seq_len=16,
        optimizer=case["optimizer"], compression_phase=case["phase"] or None,
        global_batch_size=case["gpus"] * case["micro_batches"],
    )  # fmt: skip


def test_every_case_is_on_record() -> None:
    assert [one["case"] for one in RECORDED] == CASES
    assert not any("error" in one or one["measured"]["skipped"] for one in RECORDED)


@pytest.mark.parametrize("one", RECORDED, ids=[named(one["case"]) for one in RECORDED])
def test_a_step(one: dict[str, Any]) -> None:
    report, real = ours(one["case"]), one["measured"]
    states: Counter[str] = Counter()
    for item in report.items:
        if item.component == "optimizer_states" and "master" not in item.name:
            states[item.name.rsplit(": ", 1)[-1]] += item.nbytes
    assert states == {STATES.get(name, name): nbytes for name, nbytes in real["states"].items()}
    sent: Counter[tuple[str, str, str]] = Counter()
    for kind, name, elements, calls in real["sent"] if one["case"]["gpus"] > 1 else []:
        dtype, itemsize = DTYPES[name]
        sent[kind, dtype, "calls"] += calls
        sent[kind, dtype, "payload"] += calls * elements * itemsize
    said: Counter[tuple[str, str, str]] = Counter()
    for c in report.collectives:
        said[c.collective, c.dtype, "calls"] += c.calls
        said[c.collective, c.dtype, "payload"] += c.payload
    assert said == sent
    assert report.phases == {phase: real[phase] for phase in ("forward", "backward", "step")}
    assert sum(item.at_peak for item in report.items) == report.peak


@pytest.mark.parametrize("one", RECORDED[:1], ids=[named(one["case"]) for one in RECORDED[:1]])
def test_the_record_is_what_deepspeed_does(one: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed.runtime.fp16.onebit", reason="DeepSpeed 0.19.7 and later have no 1-bit optimizers")
    assert json.loads(json.dumps(measured(one["case"]))) == one["measured"]


@pytest.mark.parametrize(
    ("elements", "ranks", "padded"), [(1, 1, 8), (64, 8, 64), (65, 8, 128), (1, 6, 144), (100, 16, 256), (1, 3, 72)]
)
def test_padding(elements: int, ranks: int, padded: int) -> None:
    sizes = Compressed(elements, ranks)
    assert (sizes.padded, sizes.chunk * ranks, sizes.packed * 8) == (padded, padded, padded)
    assert sizes.chunk % 8 == 0


@pytest.mark.parametrize("optimizer", ["onebit-adam", "onebit-lamb", "zero-one-adam", "lamb"])
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"engine": "ddp"}, "is DeepSpeed's own; allowed: with --engine deepspeed --zero 0"),
        ({"engine": "fsdp2"}, "is DeepSpeed's own"),
        ({"zero": 1}, "ZeRO"),
        ({"zero": 3}, "with --zero 0"),
        ({"cp": 2}, "--cp 2: with --optimizer"),
    ],
    ids=str,
)
def test_what_is_refused(optimizer: str, options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError, match=line) as error:
        memcalc.estimate(LLAMA, gpus=4, seq_len=16, optimizer=optimizer, **{"engine": "deepspeed", **options})
    assert "\n" not in str(error.value)


def test_the_engine_is_deepspeed_by_default() -> None:
    assert memcalc.estimate(LLAMA, gpus=4, seq_len=16, optimizer="onebit-adam").setup.engine == "deepspeed"
    with pytest.raises(memcalc.InputError, match=r"--compression-phase warmup: .*--optimizer onebit-adam"):
        memcalc.estimate(LLAMA, gpus=4, seq_len=16, compression_phase="warmup")


@pytest.mark.parametrize("optimizer", ["onebit-adam", "onebit-lamb", "zero-one-adam", "lamb"])
def test_the_time_has_the_kernels_that_compress(optimizer: str) -> None:
    how: dict[str, Any] = {"gpus": 16, "precision": "fp16-mixed", "gpu": "a100-80gb", "engine": "deepspeed"}
    own = memcalc.estimate("gpt2-xl", optimizer=optimizer, **how).time
    adam = memcalc.estimate("gpt2-xl", optimizer="adamw", **how).time
    assert own is not None and adam is not None
    assert own.breakdown["optimizer"] > adam.breakdown["optimizer"]  # type: ignore[union-attr]
    sends_less = own.breakdown["exposed_communication"] < adam.breakdown["exposed_communication"] / 4  # type: ignore[union-attr]
    assert sends_less == (optimizer != "lamb")
