"""The note on tensors with fewer rows than there are ranks."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.report.notes import notes

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 4,
}  # fmt: skip


def noted(gpus: int, **options: Any) -> list[str]:
    report = memcalc.estimate(MIXTRAL, engine="fsdp2", zero=3, gpus=gpus, seq_len=8, **options)
    return [one for one in notes(report) if "is padding" in one]


def test_experts_over_more_ranks_than_there_are() -> None:
    """A layer: 4·3·64·128 of experts, padded to twice that, and the router's 4·64; without padding 64·(64 + 32 + 32 + 64) of
    attention and 2·64 of norms; around the layers 2·64·64 and a norm of 64."""
    padded = 2 * (4 * 3 * 64 * 128 + 4 * 64)
    whole = 2 * (padded // 2 + 64 * 192 + 128) + 2 * 64 * 64 + 64
    (note,) = noted(8)
    assert "mlp.experts.gate_up_proj has 4 rows for 8 ranks and is padded to 8" in note
    assert f"{1 - whole / (whole + padded):.0%} is padding; --shard-group 4 has no such padding" in note


@pytest.mark.parametrize("options", [{"gpus": 4}, {"gpus": 8, "shard_group": 4}, {"gpus": 8, "ep": 2}])
def test_no_note_without_padding(options: dict[str, Any]) -> None:
    assert not noted(**options)
