"""The phases of GRPO before its training step on paper against TRL's and transformers' own code: their peaks, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from inference.rollout_oracle import generated, scored
from validate.test_fake import LLAMA, QWEN3

import memcalc
from memcalc.inference.rollout import GENERATE, OLD, REFERENCE, phases

SIZES: dict[str, Any] = {"task": "grpo", "micro_batch_size": 2, "seq_len": 24, "completion_len": 6, "precision": "bf16"}
LORA: dict[str, Any] = {"lora_rank": 4, "beta": 0.1}


def on_paper(report: memcalc.Report) -> dict[str, int]:
    return {one.name: one.nbytes for one in phases(report.model, report.setup, report.rank.holdings.buffer_dtype)}


def named(value: Any) -> str:
    return "-".join(map(str, value.values())) if "model_type" not in value else value["model_type"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA, {}),
        (LLAMA, {"micro_batch_size": 8, "global_batch_size": 16}),
        (LLAMA, {"seq_len": 12, "completion_len": 10}),
        (LLAMA, {"completion_len": 1}),
        (LLAMA, {"completion_len": 2}),
        (LLAMA, {"precision": "fp32"}),
        (LLAMA, {"precision": "bf16-autocast"}),
        (LLAMA, {"recompute": "full"}),
        (LLAMA, {"attention": "eager"}),
        (LLAMA, LORA),
        (LLAMA, LORA | {"precision": "bf16-autocast"}),
        (QWEN3, {}),
    ],
    ids=named,
)
def test_generate(model: dict[str, Any], options: dict[str, Any]) -> None:
    report = memcalc.estimate(model, **SIZES | options)
    assert on_paper(report)[GENERATE] == generated(report)


FAMILIES = ("gemma2", "falcon", "bloom", "mpt", "phi", "glm", "gemma3_text")
MORE = (
    "mistral", "gpt_neox", "qwen2", "stablelm", "cohere", "olmo2", "gemma", "phi3", "starcoder2", "granite",
    "exaone4", "nemotron", "arcee", "ministral3", "olmo_hybrid", "falcon_h1", "bamba", "zamba2", "lfm2", "qwen3_5_text",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)])
def test_families(family: str) -> None:
    case = step_cases(family)[0]
    options = {"micro_batch_size": case.batch, "seq_len": case.seq, "completion_len": case.seq // 2}
    report = memcalc.estimate(case.fields, **SIZES | options)
    assert on_paper(report)[GENERATE] == generated(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA, {}),
        (LLAMA, {"steps_per_generation": 3}),
        (LLAMA, {"precision": "bf16-autocast"}),
        (LLAMA, LORA),
        (LLAMA, {"seq_len": 1200, "completion_len": 1100}),
        (QWEN3, {}),
    ],
    ids=named,
)
def test_log_probabilities(model: dict[str, Any], options: dict[str, Any]) -> None:
    report = memcalc.estimate(model, **SIZES | {"beta": 0.1, "num_iterations": 2} | options)
    found = on_paper(report)
    assert found[OLD] == scored(report)
    assert found[REFERENCE] == scored(report, reference=True, kept=1)
