"""Packed rows against transformers' and TRL's own code: every number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from kernels.packed_oracle import validate
from validate.test_fake import LLAMA, QWEN3, same

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


def test_grouped_heads() -> None:
    step(QWEN3, BF16)
