"""A padded batch on paper against transformers' own code: saved bytes, both peaks, and every allocation of the mask."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import cases
import oracle
import paper
import pytest
import torch
from cases import step_cases

import memcalc
from memcalc.core.dtypes import DType, bf16, fp32
from memcalc.families import FAMILIES

if TYPE_CHECKING:
    pass


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
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 60, "n_layer": 2, "n_head": 5}
OPT: dict[str, Any] = {
    "model_type": "opt", "vocab_size": 100, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 24,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]

LLAMA_GQA = Case("llama-gqa", 2, 16, SMALL | {"model_type": "llama", "num_key_value_heads": 4, "head_dim": 12})
MISTRAL_BEYOND = Case(
    "mistral-beyond-window", 3, 16, SMALL | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 16}
)
CASES = [
    LLAMA_GQA,
    Case("llama-mha", 1, 23, SMALL | {"model_type": "llama"}),
    Case("llama-peak-in-a-layer", 3, 16, SMALL | {"model_type": "llama", "vocab_size": 2, "intermediate_size": 400}),
    Case("llama-one-token", 2, 1, SMALL | {"model_type": "llama", "num_key_value_heads": 2}),
    Case("llama-wide-heads", 2, 9, SMALL | {"model_type": "llama", "num_key_value_heads": 4, "head_dim": 264}),
    Case("qwen2-gqa", 2, 16, SMALL | {"model_type": "qwen2", "num_key_value_heads": 2}),
    Case(
        "qwen2-windows",
        1,
        24,
        SMALL
        | {"model_type": "qwen2", "num_key_value_heads": 4, "max_window_layers": 1}
        | {"use_sliding_window": True, "sliding_window": 7},
    ),
    Case("qwen3-mqa", 2, 16, SMALL | {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 12}),
    Case(
        "qwen3-windows",
        3,
        24,
        SMALL
        | {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 8, "layer_types": KINDS}
        | {"use_sliding_window": True, "sliding_window": 25},
    ),
    MISTRAL_BEYOND,
    Case(
        "mistral-inside-window",
        2,
        16,
        SMALL | {"model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 17},
    ),
    Case("phi3-gqa", 2, 16, SMALL | {"model_type": "phi3", "num_key_value_heads": 4, "pad_token_id": 0}),
    Case("phi3-mha", 1, 24, SMALL | {"model_type": "phi3", "pad_token_id": 0, "sliding_window": 12}),
    Case(
        "gemma2-inside-window",
        2,
        16,
        SMALL | {"model_type": "gemma2", "num_key_value_heads": 4, "head_dim": 12, "sliding_window": 32},
    ),
    Case(
        "gemma2-beyond-window",
        1,
        24,
        SMALL | {"model_type": "gemma2", "num_key_value_heads": 8, "head_dim": 8, "sliding_window": 12},
    ),
    Case("gpt2", 2, 16, GPT2 | {"n_positions": 32}),
    Case("gpt2-one-sequence", 1, 24, GPT2 | {"n_positions": 24, "tie_word_embeddings": False}),
    Case("gpt_neox-parallel", 2, 16, SMALL | {"model_type": "gpt_neox", "rotary_pct": 0.5}),
    Case("gpt_neox-serial", 1, 24, SMALL | {"model_type": "gpt_neox", "use_parallel_residual": False}),
    Case("opt-peak-in-a-layer", 2, 16, OPT | {"vocab_size": 2, "pad_token_id": 0, "ffn_dim": 400}),
    Case("opt-projected", 1, 24, OPT | {"word_embed_proj_dim": 40, "do_layer_norm_before": False}),
    Case("mixtral-gqa", 2, 16, SMALL | {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4}),
    Case("mixtral-mha", 1, 24, SMALL | {"model_type": "mixtral", "num_key_value_heads": 8, "sliding_window": 20}),
]

DTYPES: dict[DType, torch.dtype] = {bf16: torch.bfloat16, fp32: torch.float32}
RUNS = [
    pytest.param(
        case, dtype, attention, recompute, id=f"{case.name}-{dtype}-{attention}-{'full' if recompute else 'none'}"
    )
    for case in CASES
    for dtype in ([bf16, fp32] if case is LLAMA_GQA else [bf16])
    for attention in paper.program_of(case.fields).attention_kinds
    for recompute in (False, True)
]


def bytes_above_start(step: paper.PaperStep | oracle.Step, start: int) -> tuple[int, int, int]:
    return step.saved, step.forward - start, step.backward - start


@pytest.mark.parametrize(("case", "dtype", "attention", "recompute"), RUNS)
def test_a_padded_step_on_paper_is_the_real_one(case: Case, dtype: DType, attention: str, recompute: bool) -> None:
    workload: dict[str, Any] = {"micro_batch_size": case.batch, "seq_len": case.seq, "padded": True}
    on_paper = paper.paper_step(case.fields, dtype=dtype, attention=attention, recompute=recompute, **workload)
    oracle_step = oracle.training_step(
        deepcopy(case.fields),
        dtype=DTYPES[dtype],
        attention=attention,
        recompute=recompute,
        optimizer="sgd",
        **workload,
    )
    assert bytes_above_start(on_paper, on_paper.start) == bytes_above_start(oracle_step, oracle_step.resident)
    assert on_paper.flops == oracle_step.flops


FIRST_OF_EACH = [
    pytest.param(case, attention, id=f"{case.id}-{attention}")
    for case in (step_cases(family)[0] for family in FAMILIES)
    for program in [paper.program_of(case.fields)]
    if program.pads
    for attention in program.attention_kinds
]


@pytest.mark.parametrize(("case", "attention"), FIRST_OF_EACH)
def test_a_padded_step_of_every_family_is_the_real_one(case: cases.Case, attention: str) -> None:
    workload: dict[str, Any] = {"micro_batch_size": case.batch, "seq_len": case.seq, "padded": True}
    on_paper = paper.paper_step(case.fields, dtype=bf16, attention=attention, **workload)
    run: dict[str, Any] = {"balanced": case.balanced, "real": case.balanced, "optimizer": "sgd"}
    oracle_step = oracle.training_step(deepcopy(case.fields), attention=attention, **workload, **run)
    assert bytes_above_start(on_paper, on_paper.start) == bytes_above_start(oracle_step, oracle_step.resident)
    assert on_paper.flops == oracle_step.flops


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["t5", "deepseek_v3", "axk1"])
def test_the_memory_efficient_kernel_aligns_rows_of_a_mask(family: str, recompute: bool) -> None:
    """Of 9 keys, to 16."""
    case = step_cases(family)[1]
    workload: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 9, "padded": True, "recompute": recompute}
    on_paper = paper.paper_step(case.fields, dtype=bf16, **workload)
    run: dict[str, Any] = {"balanced": case.balanced, "real": case.balanced, "optimizer": "sgd"}
    oracle_step = oracle.training_step(deepcopy(case.fields), **workload, **run)
    assert bytes_above_start(on_paper, on_paper.start) == bytes_above_start(oracle_step, oracle_step.resident)


ENCODER_DECODERS = [
    pytest.param(step_cases(family)[1], attention, id=f"{family}-{attention}")
    for family in ("t5", "bart", "whisper")
    for attention in ("sdpa", "eager")
]


@pytest.mark.parametrize(("case", "attention"), ENCODER_DECODERS)
def test_a_padded_step_of_an_encoder_and_a_decoder_recomputed(case: cases.Case, attention: str) -> None:
    """Under autocast as well: the masks are of the weights' dtype, the scores of autocast's."""
    workload: dict[str, Any] = {"micro_batch_size": case.batch, "seq_len": case.seq, "padded": True, "recompute": True}
    on_paper = paper.paper_step(case.fields, dtype=fp32, autocast=bf16, attention=attention, **workload)
    oracle_step = oracle.training_step(
        deepcopy(case.fields),
        dtype=torch.float32,
        autocast=torch.bfloat16,
        attention=attention,
        optimizer="sgd",
        **workload,
    )
    assert bytes_above_start(on_paper, on_paper.start) == bytes_above_start(oracle_step, oracle_step.resident)
    assert on_paper.flops == oracle_step.flops


def test_every_family_of_the_first_ten_has_two_cases() -> None:
    families = [case.fields["model_type"] for case in CASES]
    assert len(set(families)) == 10
    assert all(families.count(family) >= 2 for family in families)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", [LLAMA_GQA, MISTRAL_BEYOND], ids=["causal", "sliding window"])
def test_the_mask_is_built_allocation_by_allocation(case: Case, attention: str) -> None:
    """No temporary of the mask is part of a peak: what it is built of is compared by itself."""
    run = paper.PaperRun(paper.program_of(case.fields), case.batch, case.seq, bf16, attention, padded=True)
    run.step()
    ours = [run.bytes_of(i) for i, row in enumerate(run.memory.rows) if row.scope == "causal mask"]
    step = oracle.training_step(
        deepcopy(case.fields), micro_batch_size=case.batch, seq_len=case.seq, attention=attention, padded=True, log=True
    )
    first = next(i for i, (_, _, shape) in enumerate(step.log) if shape == (case.batch, case.seq))  # the cast to bool
    assert ours == [nbytes for _, nbytes, _ in step.log[first : first + len(ours)]]


def test_padding_moves_every_number() -> None:
    """The mask, k and v for all heads: with the oracle, so that a mask that it ignored would be seen."""
    workload: dict[str, Any] = {"micro_batch_size": LLAMA_GQA.batch, "seq_len": LLAMA_GQA.seq}
    plain, padded = (oracle.training_step(deepcopy(LLAMA_GQA.fields), padded=on, **workload) for on in (False, True))
    batch, seq, heads, kv_heads, width, layers = 2, 16, 8, 4, 12, 2
    repeated = 2 * (heads - kv_heads) * batch * seq * width * 2
    additive_mask = batch * seq * seq * 2
    assert padded.saved - plain.saved == layers * (repeated + additive_mask)
    assert padded.resident - plain.resident == batch * seq * 8


def added_by_padding(family: str) -> tuple[int, int]:
    """Bytes that a padded batch of the family's first case saves and holds more than another one."""
    case = step_cases(family)[0]
    workload: dict[str, Any] = {"micro_batch_size": case.batch, "seq_len": case.seq}
    plain, padded = (oracle.training_step(deepcopy(case.fields), padded=on, **workload) for on in (False, True))
    return padded.saved - plain.saved, padded.resident - plain.resident


def test_padding_adds_a_mask_to_barts_encoder_and_to_what_looks_at_it() -> None:
    """With the oracle: 2 layers each; the decoder's attention to itself has none."""
    batch, seq, encoder_layers, decoder_layers = 2, 16, 2, 2
    additive_mask = batch * seq * seq * 2
    assert added_by_padding("bart") == ((encoder_layers + decoder_layers) * additive_mask, batch * seq * 8)


def test_padding_gives_each_of_t5s_sequences_its_own_position_bias() -> None:
    """With the oracle: the bias of all sequences becomes one of each, in every layer, and the encoder's keeps the mask.
    Between decoder and encoder there were zeros that all layers shared."""
    batch, seq, heads, encoder_layers, decoder_layers = 2, 32, 4, 2, 2
    bias = heads * seq * seq * 2
    encoder = encoder_layers * (batch - 1) * bias + batch * seq * seq
    cross_attention = decoder_layers * batch * bias - bias
    assert added_by_padding("t5") == (encoder + cross_attention, batch * seq * 8)


def test_padding_masks_nothing_in_whisper() -> None:
    """With the oracle: the mask of the frames is there and no more."""
    batch, frames = 2, 2 * 30
    assert added_by_padding("whisper") == (0, batch * frames * 8)
    estimates = [memcalc.estimate("openai/whisper-tiny", micro_batch_size=2, padded=on) for on in (False, True)]
    plain, padded = (estimate.total("buffers") for estimate in estimates)
    assert padded - plain == 2 * 3000 * 8
