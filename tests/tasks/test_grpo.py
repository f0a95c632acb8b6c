"""GRPO's training step against TRL's own trainer and LM head over transformers' models: every number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from tasks.grpo_oracle import validate
from validate.test_fake import GPT2, LLAMA, QWEN3, same

BF16: dict[str, Any] = {"precision": "bf16"}
WITHOUT_DROPOUT: dict[str, Any] = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
LORA: dict[str, Any] = BF16 | {"lora_rank": 4}


def named(value: Any) -> str:
    return "-".join(map(str, value.values())) if "model_type" not in value else value["model_type"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA, BF16),
        (LLAMA, {"precision": "fp32"}),
        (LLAMA, BF16 | {"beta": 0.04}),
        (LLAMA, BF16 | {"num_iterations": 2}),
        (LLAMA, BF16 | {"beta": 0.04, "num_iterations": 2, "steps_per_generation": 3}),
        (LLAMA, {"precision": "bf16-mixed", "global_batch_size": 6, "beta": 0.04}),
        (LLAMA, {"precision": "bf16-autocast", "beta": 0.04}),
        (LLAMA, BF16 | {"recompute": "full"}),
        (LLAMA, BF16 | {"seq_len": 1200, "completion_len": 1100}),
        (LLAMA, BF16 | {"completion_len": 31}),
        (LLAMA, BF16 | {"completion_len": 1}),
        (GPT2 | WITHOUT_DROPOUT, BF16),
        (QWEN3, {"precision": "bf16-mixed", "recompute": "full"}),
        (LLAMA, LORA | {"beta": 0.04}),
        (LLAMA, {"engine": "ddp", "gpus": 4, "beta": 0.04} | BF16),
        (LLAMA, {"engine": "deepspeed", "gpus": 4, "zero": 0}),
        (LLAMA, {"engine": "deepspeed", "gpus": 4, "zero": 1, "precision": "fp16-mixed"}),
        (
            LLAMA,
            {"engine": "deepspeed", "gpus": 4, "zero": 2, "recompute": "full", "beta": 0.1, "global_batch_size": 24},
        ),
    ],
    ids=named,
)
def test_a_step(model: dict[str, Any], options: dict[str, Any]) -> None:
    same(validate(model, **{"micro_batch_size": 2, "seq_len": 32, "completion_len": 20} | options))
