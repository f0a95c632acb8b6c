"""Each family on paper against transformers' own code: saved bytes and both peaks, to the byte."""

from __future__ import annotations

import gc
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import oracle
import paper
import pytest
import torch

from memcalc.dtypes import DType, bf16, fp32
from memcalc.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator


class Case(NamedTuple):
    """A small model that is like no default, and a workload."""

    name: str
    batch: int
    seq: int
    fields: dict[str, Any]


SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}

CASES = [
    Case(
        "llama-gqa",
        2,
        16,
        SMALL
        | {"model_type": "llama", "num_key_value_heads": 4, "head_dim": 12, "attention_bias": True}
        | {"tie_word_embeddings": True, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    Case(
        "llama-mha",
        1,
        24,
        SMALL | {"model_type": "llama", "mlp_bias": True, "num_hidden_layers": 1, "hidden_act": "quick_gelu"},
    ),
    Case("qwen2-gqa", 2, 16, SMALL | {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True}),
    Case(
        "qwen2-windows",
        1,
        24,
        SMALL
        | {"model_type": "qwen2", "num_key_value_heads": 4, "head_dim": 12, "num_hidden_layers": 4}
        | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    Case(
        "qwen3-mqa",
        2,
        16,
        SMALL | {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 12, "attention_bias": True},
    ),
    Case(
        "qwen3-windows",
        1,
        24,
        SMALL
        | {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 8, "tie_word_embeddings": True}
        | {"use_sliding_window": True, "sliding_window": 8}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    Case(
        "mistral-inside-window",
        2,
        16,
        SMALL | {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 17},
    ),
    Case(
        "mistral-beyond-window",
        3,
        16,
        SMALL | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 16, "head_dim": 12},
    ),
    Case(
        "phi3-whole-heads",
        2,
        16,
        SMALL | {"model_type": "phi3", "num_key_value_heads": 4, "pad_token_id": 0, "tie_word_embeddings": True},
    ),
    Case(
        "phi3-longrope",
        1,
        24,
        SMALL
        | {"model_type": "phi3", "num_key_value_heads": 2, "pad_token_id": 0, "sliding_window": 12}
        | {"partial_rotary_factor": 0.5, "max_position_embeddings": 64, "original_max_position_embeddings": 16}
        | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}},
    ),
    Case(
        "gemma2-capped",
        2,
        16,
        SMALL | {"model_type": "gemma2", "num_key_value_heads": 4, "head_dim": 12, "sliding_window": 12},
    ),
    Case(
        "gemma2-plain",
        1,
        24,
        SMALL
        | {"model_type": "gemma2", "num_key_value_heads": 8, "head_dim": 8, "attention_bias": True}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    Case(
        "gpt2-narrow",
        2,
        16,
        {"model_type": "gpt2", "vocab_size": 100, "n_embd": 60, "n_layer": 3, "n_head": 5}
        | {"n_positions": 32, "n_inner": 100},
    ),
    Case(
        "gpt2-untied",
        1,
        24,
        {"model_type": "gpt2", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"max_position_embeddings": 24, "tie_word_embeddings": False, "activation_function": "gelu_fast"},
    ),
    Case(
        "gpt_neox-parallel",
        2,
        16,
        SMALL | {"model_type": "gpt_neox", "num_attention_heads": 4, "rotary_pct": 0.5},
    ),
    Case(
        "gpt_neox-serial",
        1,
        24,
        SMALL
        | {"model_type": "gpt_neox", "rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": False}
        | {"tie_word_embeddings": True, "hidden_act": "gelu_python"},
    ),
    Case(
        "opt-norm-first",
        2,
        16,
        {"model_type": "opt", "vocab_size": 100, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3}
        | {"num_attention_heads": 4, "max_position_embeddings": 32, "layer_norm_elementwise_affine": False},
    ),
    Case(
        "opt-projected",
        1,
        24,
        {"model_type": "opt", "vocab_size": 100, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2}
        | {"num_attention_heads": 8, "max_position_embeddings": 24, "word_embed_proj_dim": 40}
        | {"do_layer_norm_before": False, "enable_bias": False, "tie_word_embeddings": False}
        | {"activation_function": "relu2"},
    ),
    Case(
        "mixtral-two-of-four",
        2,
        16,
        SMALL | {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4},
    ),
    Case(
        "mixtral-three-of-five",
        1,
        24,
        SMALL
        | {
            "model_type": "mixtral",
            "num_key_value_heads": 2,
            "head_dim": 12,
            "num_experts": 5,
            "num_experts_per_tok": 3,
        }
        | {"num_hidden_layers": 2, "sliding_window": 20, "tie_word_embeddings": True, "hidden_act": "mish"},
    ),
]

RECOMPUTES = {False: "none", True: "full"}
DTYPES: dict[DType, torch.dtype] = {bf16: torch.bfloat16, fp32: torch.float32}


def attention_kinds(case: Case) -> tuple[str, ...]:
    return paper.program_of(case.fields).attention_kinds


RUNS = [
    pytest.param(case, dtype, attention, recompute, id=f"{case.name}-{dtype}-{attention}-{RECOMPUTES[recompute]}")
    for case in CASES
    for dtype in DTYPES
    for attention in attention_kinds(case)
    for recompute in (False, True)
]


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> Iterator[None]:
    """The oracle collects garbage before each step; half a run would go into walking what torch has imported."""
    oracle.training_step(deepcopy(CASES[0].fields), micro_batch_size=1, seq_len=4)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def bytes_above_start(step: paper.PaperStep | oracle.Step, start: int) -> tuple[int, int, int]:
    return step.saved, step.forward - start, step.backward - start


@pytest.mark.parametrize(("case", "dtype", "attention", "recompute"), RUNS)
def test_a_step_on_paper_is_the_real_one(case: Case, dtype: DType, attention: str, recompute: bool) -> None:
    workload: dict[str, Any] = {"micro_batch_size": case.batch, "seq_len": case.seq}
    on_paper = paper.paper_step(case.fields, dtype=dtype, attention=attention, recompute=recompute, **workload)
    # torch has no fp32 grouped_mm for fake tensors; real ones are as small here.
    real = case.fields["model_type"] == "mixtral" and dtype is fp32
    oracle_step = oracle.training_step(
        deepcopy(case.fields), dtype=DTYPES[dtype], attention=attention, recompute=recompute, real=real, **workload
    )
    assert bytes_above_start(on_paper, on_paper.start) == bytes_above_start(oracle_step, oracle_step.resident)


def test_every_family_has_two_cases() -> None:
    assert {f: sum(case.fields["model_type"] == f for case in CASES) for f in FAMILIES} == dict.fromkeys(FAMILIES, 2)
