"""Adapters of routers over quantised bases: where a router is a linear layer, peft gives it the adapter of a quantised layer,
though it names the weight as a parameter; to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from validate.test_fake import same

import memcalc
from memcalc.tuning.default_targets import FUSED
from memcalc.validate.as_trained import validate

AFMOE: dict[str, Any] = {
    "model_type": "afmoe", "vocab_size": 100, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8, "moe_intermediate_size": 24, "num_experts": 9,
    "num_experts_per_tok": 4, "num_dense_layers": 0, "num_shared_experts": 1,
    "layer_types": ["full_attention", "full_attention"], "tie_word_embeddings": True,
}  # fmt: skip
ADAPTERS: dict[str, Any] = {
    "lora_rank": 4,
    "micro_batch_size": 1,
    "seq_len": 24,
    "precision": "bf16",
    "quantize": "nf4",
}


def run(model: dict[str, Any], **options: Any) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    same(validate(model, **ADAPTERS | options))


def test_a_router_alone() -> None:
    run(AFMOE, lora_targets="router.gate")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"lora_targets": "all-linear"},
        {"lora_targets": "all-linear", "quantize": "int8"},
        {"lora_targets": "router.gate", "adapter_dtype": "bf16"},
        {"lora_targets": "router.gate", "lora_dropout": 0.1},
        {"lora_targets": "router.gate", "dora": True, "precision": "fp32"},
        {"lora_targets": "all-linear", "precision": "bf16-autocast", "recompute": "full"},
    ],
    ids=str,
)
def test_more(options: dict[str, Any]) -> None:
    run(AFMOE, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(FUSED))
def test_types(kind: str) -> None:
    for case in step_cases(kind)[:2]:
        options: dict[str, Any] = {"lora_targets": "all-linear", "micro_batch_size": case.batch, "seq_len": case.seq}
        try:
            memcalc.estimate(dict(case.fields), **ADAPTERS | options)
        except memcalc.InputError:
            continue
        run(dict(case.fields), **options)
