"""Buckets that a few gradients fill, against DeepSpeed's engine: which gradients share one depends on the order of all."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.validate.run import validate

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 1000, "n_positions": 128,
}  # fmt: skip
"""Conv1D's bias has its gradient before its weight has."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"zero": 2, "gpus": 4, "reduce_bucket_size": 33000},
        {"zero": 2, "gpus": 4, "reduce_bucket_size": 16500, "overlap_comm": True, "global_batch_size": 16},
        {"zero": 3, "gpus": 4, "reduce_bucket_size": 16500, "recompute": "full"},
        {"zero": 3, "gpus": 2, "reduce_bucket_size": 33000, "global_batch_size": 8},
    ],
    ids=str,
)
def test_a_step(options: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed")
    compared = validate(GPT2, engine="deepspeed", micro_batch_size=2, seq_len=32, precision="bf16-mixed", **options)
    rows = [*compared.memory, *compared.communication]
    assert [row for row in rows if row.predicted != row.measured] == []
