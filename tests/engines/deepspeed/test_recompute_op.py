"""What torch's selective checkpointing takes of DeepSpeed's ZeRO-3, which gathers weights within what is recomputed: refused
exactly where the real step raises."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from cases import step_cases
from deepspeed_oracle import deepspeed_step
from records import on_record

import memcalc

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip
LLAMA = SMALL | {"model_type": "llama"}
QWEN2 = SMALL | {"model_type": "qwen2"}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 300}
GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # as the oracle runs it
NOTHING = {"max_live_parameters": 0, "max_reuse_distance": 0}
SOME = {"max_live_parameters": 40_000, "max_reuse_distance": 15_000}

SETUP: dict[str, Any] = {"gpus": 4, "zero": 3, "precision": "bf16-mixed", "reduce_bucket_size": 100_000}
"""A step that raises leaves its graph, and with the default's bucket gigabytes."""


@on_record
def raises(fields: dict[str, Any], seq_len: int, **thresholds: int) -> bool:
    """Whether the third step, or one before it, ends with torch's word of a mismatch."""
    how: dict[str, Any] = SETUP | thresholds
    try:
        deepspeed_step(deepcopy(fields), recompute="op", seq_len=seq_len, **how)
    except RuntimeError as error:
        assert "encountered during backward but not found in storage" in str(error)
        return True
    return False


def refused(fields: dict[str, Any], seq_len: int, **thresholds: int) -> bool:
    how: dict[str, Any] = SETUP | thresholds | {"engine": "deepspeed", "seq_len": seq_len}
    memcalc.estimate(deepcopy(fields), recompute="full", **how)
    try:
        memcalc.estimate(deepcopy(fields), recompute="op", **how)
    except memcalc.InputError as error:
        assert str(error).startswith("--recompute op: ")
        return True
    return False


@pytest.mark.parametrize(
    "fields",
    [LLAMA, *(pytest.param(one, marks=pytest.mark.slow) for one in (QWEN2, GPT2))],
    ids=["llama", "qwen2", "gpt2"],
)
@pytest.mark.parametrize(
    "thresholds",
    [
        {},
        {"param_persistence_threshold": 0, **NOTHING},
        {"param_persistence_threshold": 1000, **NOTHING, "prefetch_bucket_size": 20_000},
        {"param_persistence_threshold": 1000, **SOME, "prefetch_bucket_size": 20_000},
        {"param_persistence_threshold": 100, **SOME, "prefetch_bucket_size": 5000},
        {"param_persistence_threshold": 0, **SOME, "prefetch_bucket_size": 0},
        {"param_persistence_threshold": 0, **SOME, "prefetch_bucket_size": 50_000},
        {"param_persistence_threshold": 0, "max_live_parameters": 100_000, "max_reuse_distance": 100_000,
         "prefetch_bucket_size": 30_000},
    ],
    ids=str,
)  # fmt: skip
def test_by_what_is_gathered(fields: dict[str, Any], thresholds: dict[str, int]) -> None:
    assert refused(fields, 16, **thresholds) is raises(fields, 16, **thresholds)


def test_a_model_larger_than_what_is_kept() -> None:
    """LLaMA-7B with a 64th of each width and a 4096th of the default thresholds."""
    fields = LLAMA | {"num_hidden_layers": 32, "intermediate_size": 172, "vocab_size": 500, "num_key_value_heads": 4}
    thresholds = {"param_persistence_threshold": 64, "max_live_parameters": 244_000, "max_reuse_distance": 244_000,
                  "prefetch_bucket_size": 12_200}  # fmt: skip
    assert raises(fields, 16, **thresholds)
    assert refused(fields, 16, **thresholds)
    assert refused({"model_type": "llama"}, 2048)


@pytest.mark.parametrize(
    "model_type",
    ["bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text",
     "qwen3_5_text", "qwen3_next", "recurrent_gemma", "zamba2"],
)  # fmt: skip
def test_modules_that_use_weights_of_others(model_type: str) -> None:
    case = step_cases(model_type)[0]
    assert refused(case.fields, case.seq) is raises(case.fields, case.seq)
