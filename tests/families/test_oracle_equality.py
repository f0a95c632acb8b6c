"""Each family on paper against transformers' own code: saved bytes and both peaks, to the byte."""

from __future__ import annotations

import gc
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import oracle
import paper
import pytest
import torch

from memcalc.dtypes import DType, bf16, fp16, fp32
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
DTYPES: dict[DType, torch.dtype] = {bf16: torch.bfloat16, fp16: torch.float16, fp32: torch.float32}
PRECISIONS: dict[str, tuple[DType, DType | None]] = {
    "bf16": (bf16, None),
    "fp32": (fp32, None),
    "bf16-autocast": (fp32, bf16),
}
"""The weights' dtype and autocast's."""


def attention_kinds(case: Case) -> tuple[str, ...]:
    return paper.program_of(case.fields).attention_kinds


RUNS = [
    pytest.param(
        case, precision, attention, recompute, id=f"{case.name}-{precision}-{attention}-{RECOMPUTES[recompute]}"
    )
    for case in CASES
    for precision in PRECISIONS
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


def check(case: Case, dtype: DType, autocast: DType | None, attention: str, recompute: bool) -> None:
    options: dict[str, Any] = {"micro_batch_size": case.batch, "seq_len": case.seq, "attention": attention}
    options["recompute"] = recompute
    on_paper = paper.paper_step(case.fields, dtype=dtype, autocast=autocast, **options)
    # torch has no fp32 grouped_mm for fake tensors; real ones are as small here.
    real = case.fields["model_type"] == "mixtral" and dtype is fp32
    oracle_step = oracle.training_step(
        deepcopy(case.fields),
        dtype=DTYPES[dtype],
        autocast=DTYPES[autocast] if autocast else None,
        real=real,
        **options,
    )
    assert bytes_above_start(on_paper, on_paper.start) == bytes_above_start(oracle_step, oracle_step.resident)


@pytest.mark.parametrize(("case", "precision", "attention", "recompute"), RUNS)
def test_a_step_on_paper_is_the_real_one(case: Case, precision: str, attention: str, recompute: bool) -> None:
    check(case, *PRECISIONS[precision], attention, recompute)


@pytest.mark.parametrize("case", CASES[::2], ids=[case.name for case in CASES[::2]])
def test_autocast_to_fp16_is_the_real_one(case: Case) -> None:
    check(case, fp32, fp16, "eager", recompute=True)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["mha", "gqa"])
def test_what_a_layer_of_llama_saves_under_autocast(heads: tuple[int, int]) -> None:
    """T(26h + 4ad + 4kd + 8f + 4a + 8) and 2 bytes for each element of a matrix.

    Each of the two norms keeps its input and its output before the weight in fp32 (8h), rsqrt (4), and a 16-bit copy of its
    output for each linear layer that reads it (6h and 4h). q, k, v, the output and the logsumexp; gate, silu, up and their
    product. The residual in the middle is a norm's input; q and k are 16-bit copies of the rotated ones, which are fp32.
    """
    (a, k), h, f, d, tokens = heads, 64, 96, 12, 2 * 16
    fields = SMALL | {"model_type": "llama", "num_attention_heads": a, "num_key_value_heads": k, "head_dim": d}
    saved = [
        paper.paper_step(
            fields | {"num_hidden_layers": depth}, micro_batch_size=2, seq_len=16, dtype=fp32, autocast=bf16
        ).saved
        for depth in (1, 2)
    ]
    matrices = 2 * h * a * d + 2 * h * k * d + 3 * h * f
    assert saved[1] - saved[0] == tokens * (26 * h + 4 * a * d + 4 * k * d + 8 * f + 4 * a + 8) + 2 * matrices


def test_every_family_has_two_cases() -> None:
    assert {f: sum(case.fields["model_type"] == f for case in CASES) for f in FAMILIES} == dict.fromkeys(FAMILIES, 2)
