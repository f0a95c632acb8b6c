"""Frozen weights and adapters where ranks share the layers, against transformers' plan, torch's with sequence parallelism, and
peft: every number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from tuning.split import validate
from validate.test_fake import DEEPSEEK, LLAMA, MIXTRAL, QWEN3, same

TIED: dict[str, Any] = QWEN3 | {"num_key_value_heads": 2}
FIVE: dict[str, Any] = LLAMA | {"num_hidden_layers": 5}
WORKLOAD: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 32, "gpus": 4, "zero": 3}
SEQUENCE_PARALLEL: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
HOW: list[dict[str, Any]] = [{"tp": 2}, SEQUENCE_PARALLEL, SEQUENCE_PARALLEL | {"cross_entropy": "vocab-parallel"}]
FROZEN: list[dict[str, Any]] = [
    {"freeze": "embeddings,first:3"},
    {"freeze": "all-but:norms"},
    {"freeze": "all-but:head"},
    {"freeze": "last:3,head"},
    {"freeze": "embeddings,first:2", "recompute": "full"},
    {"freeze": "mlp", "zero": 2},
    {"freeze": "embeddings", "global_batch_size": 12},
]
LORA: dict[str, Any] = {"lora_rank": 4}
COLUMNS = "q_proj,k_proj,v_proj,gate_proj,up_proj"
ADAPTED: list[dict[str, Any]] = [
    LORA,
    LORA | {"lora_targets": COLUMNS, "recompute": "full"},
    LORA | {"lora_targets": COLUMNS, "lora_dropout": 0.1, "zero": 2},
    LORA | {"lora_targets": "q_proj", "global_batch_size": 12},
    LORA | {"modules_to_save": "norm"},
    LORA | {"recompute": "op", "shard_group": 1, "zero": 2},
    LORA | {"gpus": 8, "cp": 2, "seq_len": 64},
]


def named(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


@pytest.mark.parametrize(
    "trained", [FROZEN[0] | {"tp": 2}, pytest.param(LORA | {"tp": 2}, marks=pytest.mark.slow)], ids=named
)
def test_two_ranks(trained: dict[str, Any]) -> None:
    same(validate(LLAMA, **WORKLOAD | trained))


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW, ids=named)
@pytest.mark.parametrize("frozen", FROZEN, ids=named)
def test_frozen(frozen: dict[str, Any], how: dict[str, Any]) -> None:
    same(validate(FIVE, **WORKLOAD | frozen | how))


@pytest.mark.slow
@pytest.mark.parametrize("adapted", ADAPTED, ids=named)
def test_adapted(adapted: dict[str, Any]) -> None:
    same(validate(LLAMA, **WORKLOAD | {"tp": 2} | adapted))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        (TIED, LORA | {"lora_bias": "all"}),
        (TIED, {"freeze": "embeddings,first:1"}),
        (LLAMA | {"attention_bias": True}, LORA | {"lora_bias": "lora_only"}),
        (LLAMA | {"attention_bias": True}, {"freeze": "bias"}),
        (MIXTRAL, {"freeze": "mlp"}),
        (MIXTRAL, {"freeze": "embeddings,first:1"}),
        (MIXTRAL, LORA | {"lora_targets": "q_proj,v_proj"}),
        (DEEPSEEK, {"freeze": "mlp"}),
        (DEEPSEEK, LORA | {"lora_targets": "q_a_proj,q_b_proj"}),
        (DEEPSEEK, LORA | {"lora_targets": "kv_a_proj_with_mqa"}),
    ],
    ids=str,
)  # fmt: skip
def test_families(fields: dict[str, Any], trained: dict[str, Any]) -> None:
    same(validate(fields, **WORKLOAD | {"tp": 2} | trained))
