"""fp32 adapters beside 16-bit modules or biases that train too: clipping, other optimizers, and a 16-bit base under autocast,
against peft and torch's own step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LORA: dict[str, Any] = {
    "lora_rank": 4, "lora_targets": "all-linear", "micro_batch_size": 2, "seq_len": 32, "precision": "bf16",
    "modules_to_save": "embed_tokens,lm_head",
}  # fmt: skip
CLIPS: dict[str, Any] = {"clip_grad_norm": True}
CAST: dict[str, Any] = {"precision": "bf16-autocast", "base_dtype": "bf16"}


def named(options: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in options.items()) or "lora"


def same(options: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    from memcalc.validate.run import validate

    comparison = validate(LLAMA, **LORA | options)
    rows = comparison.memory + comparison.communication
    assert [(row.name, row.predicted) for row in rows] == [(row.name, row.measured) for row in rows]


@pytest.mark.parametrize("options", [CLIPS | {"optimizer_implementation": "fused"}, CAST | CLIPS], ids=named)
def test_a_step(options: dict[str, Any]) -> None:
    """A fused step allocates next to nothing, so the norms are its peak: two bytes for a 16-bit gradient, four for others."""
    same(options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        CLIPS,
        CLIPS | {"optimizer_implementation": "for-loop", "optimizer": "adam"},
        CLIPS | {"optimizer": "adamw-8bit"},
        CLIPS | {"optimizer": "paged-adamw"},
        CLIPS | {"optimizer": "paged-adamw-8bit"} | CAST,
        CLIPS | {"quantize": "nf4"} | CAST,
        CLIPS | {"lora_bias": "all", "modules_to_save": None},
        CLIPS | {"lora_bias": "lora_only", "modules_to_save": None, "optimizer_implementation": "fused"} | CAST,
        CLIPS | {"global_batch_size": 4, "optimizer_implementation": "fused"} | CAST,
        {"optimizer": "adamw-8bit"},
        CAST,
        CAST | {"recompute": "full"},
        CAST | {"modules_to_save": "norm"},
        CAST | {"modules_to_save": "lm_head", "recompute": "full"},
        CAST | {"modules_to_save": "embed_tokens"},
    ],
    ids=named,
)
def test_more_steps(options: dict[str, Any]) -> None:
    same(options)
