"""Biases that do not train under ZeRO-3: DeepSpeed's linear function sums no gradient for them."""

from __future__ import annotations

from typing import Any

import pytest
from validate.test_fake import same

from memcalc.validate import run

DEBERTA: dict[str, Any] = {
    "model_type": "deberta-v2", "vocab_size": 5, "hidden_size": 48, "intermediate_size": 30, "num_hidden_layers": 2,
    "num_attention_heads": 3, "relative_attention": True, "position_buckets": 16, "pos_att_type": "c2p",
}  # fmt: skip
ZERO: dict[str, Any] = {"engine": "deepspeed", "gpus": 2, "zero": 3, "micro_batch_size": 2, "seq_len": 16}


@pytest.mark.parametrize("tuned", [{"lora_rank": 4, "lora_targets": "query_proj"}, {"freeze": "bias"}], ids=str)
def test_a_head_whose_bias_is_frozen(tuned: dict[str, Any]) -> None:
    """The gradient of few logits is there when the last linear layer's backward ends, and the peak is there, too."""
    pytest.importorskip("deepspeed")
    if "lora_rank" in tuned:
        pytest.importorskip("peft")
    same(run.validate(DEBERTA, reduce_bucket_size=5000, **ZERO | tuned))
