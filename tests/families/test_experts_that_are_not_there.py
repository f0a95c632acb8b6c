"""Shared experts of no width, layers without experts, and more experts of a token than there are: what transformers runs."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import oracle
import paper
import pytest
import torch
from cases import step_cases
from meta_models import built

import memcalc
from memcalc.core.dtypes import bf16

NO_SHARED: dict[str, str] = {
    "deepseek_v2": "n_shared_experts",
    "deepseek_v3": "n_shared_experts",
    "glm4_moe": "n_shared_experts",
    "glm4_moe_lite": "n_shared_experts",
    "axk1": "n_shared_experts",
    "dots1": "n_shared_experts",
    "solar_open": "n_shared_experts",
    "exaone_moe": "num_shared_experts",
    "hy_v3": "num_shared_experts",
    "afmoe": "num_shared_experts",
    "qwen2_moe": "shared_expert_intermediate_size",
    "qwen3_next": "shared_expert_intermediate_size",
    "qwen3_5_moe_text": "shared_expert_intermediate_size",
    "granitemoehybrid": "shared_intermediate_size",
}
"""The field that says how much of them there is."""

NO_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 0},
    "qwen3_moe": {"num_experts": 0},
    "qwen3_next": {"num_experts": 0},
}
ALL_DENSE: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"decoder_sparse_step": 99},
    "qwen3_moe": {"mlp_only_layers": list(range(9))},
    "deepseek_v3": {"first_k_dense_replace": 99},
    "ernie4_5_moe": {"moe_layer_start_index": 99},
    "lfm2_moe": {"num_dense_layers": 99},
    "afmoe": {"num_dense_layers": 99},
    "llama4_text": {"moe_layers": []},
}


def check(model_type: str, changed: dict[str, Any]) -> None:
    """Parameters, bytes and FLOPs of a recomputed step."""
    case = step_cases(model_type)[0]
    fields = case.fields | changed
    attention = memcalc.load_model(fields).program.attention_kinds[0]
    how: dict[str, Any] = {
        "micro_batch_size": case.batch,
        "seq_len": case.seq,
        "attention": attention,
        "recompute": True,
    }
    assert [(name, shape) for name, shape, _ in memcalc.load_model(fields).weights()] == built(fields).parameters
    ours = paper.paper_step(fields, dtype=bf16, **how)
    real = oracle.training_step(
        deepcopy(fields), dtype=torch.bfloat16, optimizer="sgd", balanced=case.balanced,
        real=case.real or case.balanced, **how,
    )  # fmt: skip
    assert (ours.saved, ours.forward - ours.start) == (real.saved, real.forward - real.resident)
    assert ours.backward - ours.start == real.backward - real.resident
    assert ours.flops == real.flops


@pytest.mark.parametrize("model_type", NO_SHARED)
def test_no_shared_expert(model_type: str) -> None:
    check(model_type, {NO_SHARED[model_type]: 0})


@pytest.mark.parametrize("model_type", NO_EXPERTS)
def test_no_experts(model_type: str) -> None:
    check(model_type, NO_EXPERTS[model_type])


@pytest.mark.parametrize("model_type", ALL_DENSE)
def test_more_experts_of_a_token_than_there_are_where_none_is_sent_to_any(model_type: str) -> None:
    per_token = "moe_k" if model_type == "ernie4_5_moe" else "num_experts_per_tok"
    check(model_type, {**ALL_DENSE[model_type], per_token: 99})
    model = memcalc.load_model({**step_cases(model_type)[0].fields, per_token: 99})  # which transformers makes
    with pytest.raises(memcalc.InputError, match=f"{per_token} 99 is above "):
        memcalc.estimate(model, seq_len=16)


def test_phimoe_sends_a_token_to_two_experts_whatever_is_asked() -> None:
    check("phimoe", {"num_experts_per_tok": 99})


def test_phimoe_sends_a_token_to_one_expert_twice() -> None:
    """Its second choice is that of what the first has left, where that is nothing the first expert again."""
    check("phimoe", {"num_local_experts": 1})
    with pytest.raises(memcalc.InputError, match="is above"):
        memcalc.estimate(
            step_cases("phimoe")[0].fields | {"num_local_experts": 1, "output_router_logits": True}, seq_len=8
        )
