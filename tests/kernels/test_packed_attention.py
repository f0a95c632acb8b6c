"""Packed rows against transformers' and TRL's own code: every number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from kernels.packed_oracle import validate
from validate.test_fake import LLAMA, QWEN3, same

from memcalc.tasks.packing_checks import CHECKED

BF16: dict[str, Any] = {"precision": "bf16"}


def step(model: dict[str, Any], options: dict[str, Any]) -> None:
    same(validate(model, **{"micro_batch_size": 2, "seq_len": 32} | options))


@pytest.mark.parametrize(
    "options",
    [
        BF16,
        BF16 | {"micro_batch_size": 1},
        {"precision": "bf16-mixed", "global_batch_size": 6},
        {"precision": "bf16-autocast"},
        BF16 | {"recompute": "full"},
        BF16 | {"attention": "sdpa"},
        {"precision": "fp32", "attention": "sdpa", "micro_batch_size": 1},
        BF16 | {"attention": "sdpa", "recompute": "full", "micro_batch_size": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("task", ["pretrain", "sft"])
def test_a_step(task: str, options: dict[str, Any]) -> None:
    step(LLAMA, {"task": task} | options)


@pytest.mark.parametrize("family", CHECKED)
def test_families(family: str) -> None:
    """Sizes as the tests of families have them: heads that are no multiple of 8 are copied."""
    case = step_cases(family)[0]
    same(validate(case.fields, micro_batch_size=case.batch, seq_len=case.seq, **BF16))


@pytest.mark.parametrize("family", ["mistral", "olmo3", "qwen2", "gemma"])
def test_masks_of_families(family: str) -> None:
    """Layers with a window have a mask of their own."""
    for case in step_cases(family)[:2]:
        same(validate(case.fields, micro_batch_size=case.batch, seq_len=case.seq, attention="sdpa", **BF16))


@pytest.mark.parametrize(
    "options",
    [
        BF16 | {"lora_rank": 4},
        BF16 | {"lora_rank": 4, "quantize": "nf4", "task": "sft", "recompute": "full"},
        BF16 | {"engine": "ddp", "gpus": 2},
        {"engine": "fsdp2", "gpus": 2},
        {"engine": "fsdp2", "gpus": 2, "recompute": "full", "attention": "sdpa"},
        {"engine": "deepspeed", "gpus": 2, "zero": 2, "task": "sft"},
        {"engine": "deepspeed", "gpus": 2, "zero": 3},
    ],
    ids=str,
)
def test_engines_and_adapters(options: dict[str, Any]) -> None:
    step(LLAMA, options)


def test_grouped_heads() -> None:
    step(QWEN3, BF16)
