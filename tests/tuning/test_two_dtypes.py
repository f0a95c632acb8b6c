"""fp32 adapters beside 16-bit modules or biases that train too: clipping, other optimizers, and a 16-bit base under autocast,
against peft and torch's own step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LORA: dict[str, Any] = {
    "lora_rank": 4, "lora_targets": "all-linear", "micro_batch_size": 2, "seq_len": 32, "precision": "bf16",
    "modules_to_save": "embed_tokens,lm_head",
}  # fmt: skip
CLIPS: dict[str, Any] = {"clip_grad_norm": True}
DDP: dict[str, Any] = {"engine": "ddp", "gpus": 2}
CAST: dict[str, Any] = {"precision": "bf16-autocast", "base_dtype": "bf16"}


def named(options: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in options.items()) or "lora"


def same(options: dict[str, Any], model: dict[str, Any] = LLAMA) -> None:
    pytest.importorskip("peft")
    from memcalc.validate.run import validate

    comparison = validate(model, **LORA | options)
    rows = comparison.memory + comparison.communication
    assert [(row.name, row.predicted) for row in rows] == [(row.name, row.measured) for row in rows]


@pytest.mark.parametrize(
    "options", [CLIPS | {"optimizer_implementation": "fused"}, CAST | CLIPS, CAST | CLIPS | DDP], ids=named
)
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
        CAST | DDP | {"gpus": 4, "global_batch_size": 24},
        DDP | {"modules_to_save": None, "lora_bias": "all"},
    ],
    ids=named,
)
def test_more_steps(options: dict[str, Any]) -> None:
    same(options)


def test_buckets_of_two_dtypes() -> None:
    """A bucket has one dtype, and each dtype begins with a small one (1 MiB, then 25 MiB)."""
    wide = LLAMA | {"vocab_size": 40_000, "hidden_size": 1024, "intermediate_size": 2048}
    report = memcalc.estimate(wide, **LORA | CAST | DDP | {"lora_rank": 64})
    sent = {one.dtype: (one.calls, one.payload) for one in report.collectives if one.name == "gradient buckets"}
    assert sent["bf16"] == (2, 2 * 40_000 * 1024 * 2)
    adapters = report.model.trainable_parameters - 2 * 40_000 * 1024
    assert sent["fp32"][1] == 4 * adapters
    with pytest.raises(InputError, match=r"--adapter-dtype fp32: .* with engine ddp and --comm-hook fp16"):
        memcalc.estimate(LLAMA, **LORA | CAST | DDP | {"comm_hook": "fp16"})


@pytest.mark.slow
def test_many_buckets() -> None:
    same(
        {**CAST, **DDP, "lora_rank": 64}, LLAMA | {"vocab_size": 40_000, "hidden_size": 1024, "intermediate_size": 2048}
    )
