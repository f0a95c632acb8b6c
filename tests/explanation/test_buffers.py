"""Reasons of buffers: each kind that an engine has is explained."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.explanation.buffers import buffer_reason, kind_of
from memcalc.explanation.reasons import reason

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}

SETUPS: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer": "adamw-8bit"},
    {"padded": True},
    {"engine": "ddp"},
    *({"engine": "deepspeed", "zero": zero} for zero in range(4)),
    *({"engine": "deepspeed", "zero": zero, "precision": "fp16-mixed", "global_batch_size": 16} for zero in range(4)),
    {"engine": "deepspeed", "zero": 3, "cp": 2},
    {"engine": "deepspeed", "zero": 0, "tp": 2},
    {"engine": "deepspeed", "zero": 1, "tp": 2, "pp": 2, "global_batch_size": 8},
    {"engine": "fsdp2", "zero": 3, "shard_group": 2},
    {"engine": "fsdp2", "zero": 2, "global_batch_size": 16},
    {"engine": "fsdp2", "zero": 3, "cp": 2},
    {"engine": "fsdp2", "zero": 3, "pp": 2, "global_batch_size": 16},
    {"engine": "megatron", "tp": 2, "pp": 2, "global_batch_size": 8},
    {"engine": "megatron", "zero": 1, "cp": 2},
    {"engine": "megatron", "attention": "eager"},
    {"engine": "megatron", "precision": "fp16-mixed"},
    {"engine": "fsdp1", "clip_grad_norm": True},
    {"engine": "fsdp1", "zero": 2, "use_orig_params": False, "global_batch_size": 16},
    {"engine": "data-parallel"},
    {"engine": "parameter-server"},
)


def unexplained(model: dict[str, Any], options: dict[str, Any]) -> set[str]:
    gpus = 4 if "engine" in options else 1
    report = memcalc.estimate(model, gpus=gpus, seq_len=64, **options)
    kinds = ("buffers", "optimizer_states")
    return {item.name for item in report.items if item.component in kinds and not reason(report, item, "en")}


@pytest.mark.parametrize("options", SETUPS, ids=str)
def test_every_buffer_and_state_has_a_reason(options: dict[str, Any]) -> None:
    assert not unexplained(LLAMA, options)


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "megatron", "ep": 4},
        {"engine": "megatron", "ep": 2, "tp": 2, "zero": 1},
        {"engine": "fsdp2", "zero": 3, "ep": 2},
        {"engine": "deepspeed", "zero": 2, "ep": 2},
        {"engine": "deepspeed", "zero": 3, "ep": 2},
    ],
    ids=str,
)
def test_every_buffer_of_experts_has_a_reason(options: dict[str, Any]) -> None:
    assert not unexplained(MIXTRAL, options)


def test_a_name_is_read_without_its_size_and_its_tensor() -> None:
    assert kind_of("model.layers.*: all-gather result (layers)") == "all-gather result"
    assert buffer_reason("model.layers.*: all-gather result (layers)") is not None
    assert buffer_reason("model.rotary_emb.inv_freq") is not None
    assert buffer_reason("some tensor that no engine has") is None
