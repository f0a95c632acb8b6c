"""Frozen weights and adapters in the stages of a pipeline, against torch's stages and schedules and peft: every number of a
step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from tuning.pipelined import validate
from validate.test_fake import LLAMA, same

LORA: dict[str, Any] = {"lora_rank": 4}
SIX: dict[str, Any] = LLAMA | {"num_hidden_layers": 6}
WORKLOAD: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 32}
EACH: list[dict[str, Any]] = [
    {"freeze": "embeddings,first:2"},
    {"freeze": "embeddings,first:4"},
    {"freeze": "all-but:head"},
    {"freeze": "all-but:norms"},
    {"freeze": "last:2,head"},
    LORA,
    LORA | {"lora_targets": "all-linear", "recompute": "full"},
]


def named(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


def step(rank: int, schedule: str, micro_batches: int, **options: Any) -> Any:
    pp, gpus = options.pop("pp", 2), options.pop("gpus", 4)
    batch = micro_batches * WORKLOAD["micro_batch_size"] * (gpus // pp)
    return validate(
        SIX, gpus=gpus, pp=pp, pp_rank=rank, schedule=schedule, global_batch_size=batch, **{**WORKLOAD, "zero": 3, **options}
    )


@pytest.mark.parametrize("trained", EACH, ids=named)
@pytest.mark.parametrize("rank", [0, 1])
def test_1f1b(rank: int, trained: dict[str, Any]) -> None:
    same(step(rank, "1f1b", 5, **trained))
