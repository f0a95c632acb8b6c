"""Frozen weights where ranks share the layers, against transformers' plan, torch's with sequence parallelism, and peft: every
number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from tuning.split import validate
from validate.test_fake import LLAMA, QWEN3, same

FIVE: dict[str, Any] = LLAMA | {"num_hidden_layers": 5}
WORKLOAD: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 32, "gpus": 4, "tp": 2, "zero": 3}
FROZEN: list[dict[str, Any]] = [
    {"freeze": "embeddings,first:3"},
    {"freeze": "all-but:norms"},
    {"freeze": "all-but:head"},
    {"freeze": "last:3,head"},
    {"freeze": "embeddings,first:2", "recompute": "full"},
    {"freeze": "mlp"},
    {"freeze": "embeddings", "global_batch_size": 12},
]


def named(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


@pytest.mark.parametrize("how", [{}, {"sequence_parallel": True}, {"sequence_parallel": True, "cross_entropy": "vocab-parallel"}], ids=named)
@pytest.mark.parametrize("frozen", FROZEN, ids=named)
def test_frozen(frozen: dict[str, Any], how: dict[str, Any]) -> None:
    same(validate(FIVE, **WORKLOAD, **frozen, **how))
