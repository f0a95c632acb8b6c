"""Frozen weights and adapters where ranks share the sequences, against torch, DeepSpeed and peft: every number of a step, to the
byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from tuning.peft_step import validate
from validate.test_fake import LLAMA, same

LORA: dict[str, Any] = {"lora_rank": 4}
EACH: list[dict[str, Any]] = [
    {"freeze": "embeddings,first:1"},
    {"freeze": "all-but:norms"},
    LORA,
    LORA | {"lora_targets": "all-linear", "recompute": "full"},
]


def named(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


@pytest.mark.parametrize("trained", EACH, ids=named)
@pytest.mark.parametrize("how", [{}, {"cp_comm_type": "p2p"}, {"zero": 2}], ids=named)
def test_fsdp2(how: dict[str, Any], trained: dict[str, Any]) -> None:
    same(validate(LLAMA, engine="fsdp2", gpus=4, cp=2, micro_batch_size=2, seq_len=64, **how, **trained))


@pytest.mark.parametrize(
    "options",
    [
        {"freeze": "head"},
        {"freeze": "first:2", "recompute": "op"},
        {"freeze": "embeddings", "global_batch_size": 12},
        LORA | {"dora": True},
        LORA | {"modules_to_save": "norm"},
    ],
    ids=named,
)
def test_more_of_fsdp2(options: dict[str, Any]) -> None:
    same(validate(LLAMA, engine="fsdp2", gpus=4, cp=2, micro_batch_size=2, seq_len=64, **options))


@pytest.mark.parametrize("trained", [*EACH, LORA | {"dora": True}, LORA | {"modules_to_save": "norm"}], ids=named)
@pytest.mark.parametrize(
    "how", [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3, "param_persistence_threshold": 10}], ids=named
)
def test_deepspeed(how: dict[str, Any], trained: dict[str, Any]) -> None:
    same(validate(LLAMA, engine="deepspeed", gpus=4, cp=2, micro_batch_size=2, seq_len=64, **how, **trained))


@pytest.mark.parametrize(
    ("family", "trained"), [("qwen3", EACH[3]), ("mixtral", EACH[0]), ("phi3", EACH[3]), ("phi3", EACH[0])]
)
def test_families(family: str, trained: dict[str, Any]) -> None:
    fields = step_cases(family)[0].fields
    same(validate(fields, engine="fsdp2", gpus=4, cp=2, micro_batch_size=1, seq_len=64, **trained))
