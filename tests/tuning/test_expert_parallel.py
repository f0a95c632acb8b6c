"""Frozen weights and adapters where ranks share the experts, against transformers' AllToAllEP and peft: every number of a step,
to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from tuning.split import validate
from validate.test_fake import MIXTRAL, same

WORKLOAD: dict[str, Any] = {"micro_batch_size": 1, "seq_len": 64, "gpus": 8, "ep": 4, "zero": 3}
LORA: dict[str, Any] = {"lora_rank": 4, "lora_targets": "q_proj,v_proj"}
EACH: list[dict[str, Any]] = [
    {"freeze": "mlp"},
    {"freeze": "embeddings,first:2"},
    {"freeze": "all-but:norms"},
    {"freeze": "embeddings,first:1", "recompute": "full"},
    {"freeze": "attention", "zero": 2},
    LORA,
    LORA | {"lora_targets": "q_proj,o_proj", "recompute": "full"},
    {"freeze": "mlp", "tp": 2},
    LORA | {"tp": 2},
]


def named(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "trained", [EACH[1], *(pytest.param(one, marks=pytest.mark.slow) for one in EACH if one != EACH[1])], ids=named
)
def test_mixtral(trained: dict[str, Any]) -> None:
    same(validate(MIXTRAL | {"num_hidden_layers": 3}, **WORKLOAD | trained))
