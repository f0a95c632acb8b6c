"""Frozen weights and adapters in the stages of a pipeline, against torch's stages and schedules and peft: every number of a
step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from tuning.pipelined import validate
from validate.test_fake import DEEPSEEK, LLAMA, same

LORA: dict[str, Any] = {"lora_rank": 4}
SIX: dict[str, Any] = LLAMA | {"num_hidden_layers": 6}
WORKLOAD: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 32, "zero": 3}
IN_ALL_STAGES: list[dict[str, Any]] = [
    LORA,
    {"freeze": "all-but:norms"},
    {"freeze": "embeddings,first:1"},
    LORA | {"lora_targets": "all-linear", "recompute": "full"},
    LORA | {"modules_to_save": "lm_head,embed_tokens"},
]
NOT_IN_THE_FIRST: list[dict[str, Any]] = [{"freeze": "embeddings,first:4"}, {"freeze": "all-but:head"}]
EACH: list[dict[str, Any]] = [
    *IN_ALL_STAGES,
    *NOT_IN_THE_FIRST,
    {"freeze": "embeddings,first:2", "recompute": "op"},
    {"freeze": "embeddings,first:4", "recompute": "full"},
    {"freeze": "embeddings,first:4", "recompute": "full", "input_require_grads": False},
    {"freeze": "last:2,head"},
    LORA | {"dora": True},
    LORA | {"lora_targets": "lm_head"},
    LORA | {"lora_bias": "all", "lora_dropout": 0.1},
    LORA | {"modules_to_save": "norm"},
]


def named(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


def step(rank: int, schedule: str, micro_batches: int, fields: dict[str, Any] = SIX, **options: Any) -> Any:
    given = {"pp": 2, "gpus": 4, **WORKLOAD, **options}
    batch = (
        micro_batches
        * given["micro_batch_size"]
        * (given["gpus"] // (given["pp"] * given.get("tp", 1) * given.get("cp", 1)))
    )
    return validate(fields, pp_rank=rank, schedule=schedule, global_batch_size=batch, **given)


@pytest.mark.parametrize(("rank", "trained"), [(1, IN_ALL_STAGES[0]), (0, NOT_IN_THE_FIRST[0])], ids=str)
def test_two_stages(rank: int, trained: dict[str, Any]) -> None:
    same(step(rank, "1f1b", 3, **trained))


@pytest.mark.slow
@pytest.mark.parametrize("trained", EACH, ids=named)
@pytest.mark.parametrize("rank", [0, 1])
def test_1f1b(rank: int, trained: dict[str, Any]) -> None:
    same(step(rank, "1f1b", 5, **trained))


@pytest.mark.slow
@pytest.mark.parametrize("trained", EACH, ids=named)
@pytest.mark.parametrize("rank", [0, 1])
def test_gpipe(rank: int, trained: dict[str, Any]) -> None:
    same(step(rank, "gpipe", 6, **trained))


@pytest.mark.slow
@pytest.mark.parametrize("trained", EACH, ids=named)
@pytest.mark.parametrize("rank", [0, 1])
def test_interleaved(rank: int, trained: dict[str, Any]) -> None:
    """Each of what trains on both ranks, on one of them with ZeRO-2 and on the other with ZeRO-3, in turn."""
    fields = SIX | {"num_hidden_layers": 8}
    zero = (2, 3)[(EACH.index(trained) + rank) % 2]
    same(step(rank, "interleaved", 6, fields, virtual_stages=2, **trained | {"zero": zero}))


@pytest.mark.slow
@pytest.mark.parametrize("trained", [*IN_ALL_STAGES, LORA | {"dora": True}], ids=named)
@pytest.mark.parametrize("rank", [0, 1])
def test_zero_bubble(rank: int, trained: dict[str, Any]) -> None:
    same(
        step(rank, "zero-bubble", 4, zero=2, **{name: value for name, value in trained.items() if name != "recompute"})
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"tp": 2, "gpus": 8, **LORA},
        {"tp": 2, "gpus": 8, "freeze": "embeddings,first:4"},
        {"tp": 2, "gpus": 8, "freeze": "embeddings,first:4", "sequence_parallel": True},
        {"tp": 2, "gpus": 8, "freeze": "first:2", "sequence_parallel": True, "cross_entropy": "vocab-parallel"},
        {"cp": 2, "gpus": 8, "seq_len": 64, **LORA},
        {"cp": 2, "gpus": 8, "seq_len": 64, "freeze": "embeddings,first:4"},
    ],
    ids=named,
)
@pytest.mark.parametrize("rank", [0, 1])
def test_other_axes(rank: int, how: dict[str, Any]) -> None:
    same(step(rank, "1f1b", 3, **how))


@pytest.mark.slow
@pytest.mark.parametrize("trained", [{"freeze": "embeddings,first:3"}, {"freeze": "attention"}], ids=named)
@pytest.mark.parametrize("rank", [0, 1])
def test_experts(rank: int, trained: dict[str, Any]) -> None:
    same(step(rank, "1f1b", 3, DEEPSEEK | {"num_hidden_layers": 6, "tie_word_embeddings": False}, **trained))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "trained"),
    [("gpipe", LORA), ("1f1b", {"freeze": "embeddings,first:6"}), ("1f1b", {"freeze": "last:7"})],
    ids=str,
)
def test_many_layers_and_micro_batches(schedule: str, trained: dict[str, Any]) -> None:
    """More of both than are run on paper."""
    fields = LLAMA | {"num_hidden_layers": 16}
    same(step(0, schedule, 7, fields, micro_batch_size=1, seq_len=8, **trained))
