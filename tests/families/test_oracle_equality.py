"""Each family on paper against transformers' own code: saved bytes and both peaks, to the byte."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import oracle
import paper
import pytest
import torch
from cases import Case, step_cases
from timeline import differences

import memcalc
from memcalc.core.dtypes import DType, bf16, fp16, fp32
from memcalc.core.ops import attention
from memcalc.families import FAMILIES
from memcalc.tape.profile import Choices, trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memcalc.core.tensor import Tensor

CASES = [case for family in FAMILIES for case in step_cases(family)]
RECOMPUTES = {False: "none", True: "full"}
DTYPES: dict[DType, torch.dtype] = {bf16: torch.bfloat16, fp16: torch.float16, fp32: torch.float32}
PRECISIONS: dict[str, tuple[DType, DType | None]] = {
    "bf16": (bf16, None),
    "fp32": (fp32, None),
    "bf16-autocast": (fp32, bf16),
    "fp16-autocast": (fp32, fp16),
}
"""The weights' dtype and autocast's."""


def choices(case: Case, precision: str) -> Iterator[tuple[str, bool]]:
    """Attention kinds and whether to recompute, as far as transformers offers them: in the case's first precision all
    kinds, and a family's cases take turns at which of them is recomputed; in others the first kind without recomputation,
    under autocast the last with it besides."""
    program = paper.program_of(case.fields)
    kinds = program.attention_kinds
    if precision == case.dtypes[0]:
        yield from ((attention, False) for attention in kinds)
        if program.recomputes:
            yield kinds[step_cases(case.model_type).index(case) % len(kinds)], True
    else:
        yield kinds[0], False
        if program.recomputes and "autocast" in precision:
            yield kinds[-1], True


def precisions(case: Case) -> tuple[str, ...]:
    """Those that the case names; autocast too, for the first case of a family that has it."""
    first = case.name == step_cases(case.model_type)[0].name
    return (*case.dtypes, "bf16-autocast") if first and paper.program_of(case.fields).autocasts else case.dtypes


RUNS = [
    pytest.param(case, precision, attention, recompute, id=f"{case.id}-{precision}-{attention}-{RECOMPUTES[recompute]}")
    for case in CASES
    for precision in precisions(case)
    for attention, recompute in choices(case, precision)
]


ANOTHER_TIMELINE: Mapping[str, str] = {
    "biogpt": "numbers of positions, before the layers",
    "camembert": "as roberta",
    "data2vec-text": "as roberta",
    "ernie": "the embeddings of tasks, until all embeddings are added up",
    "falcon": "the order in which alibi is divided, before the layers",
    "falcon_mamba": "as mamba",
    "gpt_neo": "a zero",
    "hunyuan_v1_moe": "the router's probabilities, in a recomputed layer's forward",
    "mamba": "64 bytes of a recomputed layer",
    "megatron-bert": "a decoder's positions that count, as booleans, before the layers",
    "olmo": "clamps in place with a bias, over a view: autograd copies the whole gradient (CopySlices)",
    "olmoe": "as olmo",
    "olmo_hybrid": "layers of blocks that are too much alike to be told apart",
    "phimoe": "its router's masks",
    "recurrent_gemma": "as rwkv",
    "roberta": "numbers of positions under autocast, before the layers",
    "rwkv": "a scan, of which several steps are one block on paper",
    "t5": "as olmo_hybrid",
    "xlm-roberta": "as roberta",
}
"""Types that have something alive a moment longer or shorter than the real ones, and what. The peaks are held all the same."""


def bytes_above_start(step: paper.PaperStep | oracle.Step, start: int) -> tuple[int, int, int]:
    return step.saved, step.forward - start, step.backward - start


def check(case: Case, precision: str, attention: str, recompute: bool) -> None:
    dtype, autocast = PRECISIONS[precision]
    workload: dict[str, Any] = {"micro_batch_size": case.batch, "seq_len": case.seq}
    run: dict[str, Any] = {"attention": attention, "recompute": recompute}
    on_paper = paper.paper_step(case.fields, dtype=dtype, autocast=autocast, **run, **workload)
    oracle_step = oracle.training_step(
        deepcopy(case.fields),
        dtype=DTYPES[dtype],
        autocast=DTYPES[autocast] if autocast else None,
        optimizer="sgd",  # any: its states are there before and after
        balanced=case.balanced,
        real=case.real or case.balanced,
        **run,
        **workload,
    )
    ours_and_theirs = {
        quantity: list(pair)
        for quantity, *pair in zip(
            ("saved", "forward", "backward"),
            bytes_above_start(on_paper, on_paper.start),
            bytes_above_start(oracle_step, oracle_step.resident),
            strict=True,
        )
    }
    declared = case.differs.get(f"{precision}-{attention}-{RECOMPUTES[recompute]}", {})
    assert {q: pair for q, pair in ours_and_theirs.items() if pair[0] != pair[1]} == declared
    assert on_paper.flops == oracle_step.flops
    lasting = {
        f"{phase}: {on_paper.rows[phase][place].label}": more
        for phase in ("forward", "backward")
        for place, more in differences(on_paper.made[phase], oracle_step.made[phase])
    }
    assert case.model_type in ANOTHER_TIMELINE or lasting == {}


@pytest.mark.parametrize(("case", "precision", "attention", "recompute"), RUNS)
def test_a_step_on_paper_is_the_real_one(case: Case, precision: str, attention: str, recompute: bool) -> None:
    check(case, precision, attention, recompute)


FP16 = [step_cases(family)[1] for family in ("llama", "gpt2", "gemma2", "mixtral", "gpt_neox", "opt")]


@pytest.mark.parametrize("case", FP16, ids=[case.id for case in FP16])
def test_autocast_to_fp16_is_the_real_one(case: Case) -> None:
    check(case, "fp16-autocast", "eager", recompute=True)


@pytest.mark.parametrize("seq", [1, 24, 33])
@pytest.mark.parametrize("family", ["t5", "deepseek_v3", "axk1"])
def test_the_memory_efficient_kernel_pads_its_statistics(family: str, seq: int) -> None:
    """To 32 queries: CUDA's, and torch's own rule for fake tensors."""
    check(step_cases(family)[1]._replace(seq=seq), "bf16", "sdpa", recompute=False)


@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("seq", [1, 8, 9, 16])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_memory_efficient_kernel_aligns_rows_of_a_bias(batch: int, seq: int, heads: int) -> None:
    """To 8 keys, and those of its gradient to 16 (preprocess_mask in native/transformers/attention.cpp, and torch's own rule
    for fake tensors). The model is so small that these are its peak."""
    fields = {"vocab_size": 3, "d_model": 16, "d_kv": 8, "d_ff": 9, "num_heads": heads, "num_layers": 1}
    case = step_cases("t5")[1]
    case = case._replace(batch=batch, seq=seq, fields=case.fields | fields | {"num_decoder_layers": 1})
    check(case, "bf16", "sdpa", recompute=True)


def test_a_run_says_whether_it_took_that_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of such a run is of sequences that are padded alike, and of no other."""
    taken: list[Tensor] = []
    kernel = attention._efficient  # pyright: ignore[reportPrivateUsage]

    def noted(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Any:
        taken.append(q)
        return kernel(q, k, v, is_causal)

    monkeypatch.setattr(attention, "_efficient", noted)
    padded = 0
    for case in CASES:
        program = paper.program_of(case.fields)
        if "sdpa" in program.attention_kinds and not program.source:
            taken.clear()
            run = trace(program, Choices(bf16, "sdpa", recompute=False, accumulating=False), 1, 24, program.layers)
            assert run.pads_queries == bool(taken)
            if taken:
                model, options = memcalc.load_model(case.fields), {"precision": "bf16", "attention": "sdpa"}
                first, other, fresh = (
                    memcalc.estimate(of, seq_len=seq, **options).phases
                    for of, seq in ((model, 24), (model, 25), (case.fields, 25))
                )
                assert first != other == fresh
                padded += 1
    assert padded > 2


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["mha", "gqa"])
def test_what_a_layer_of_llama_saves_under_autocast(heads: tuple[int, int]) -> None:
    """T(26h + 4ad + 4kd + 8f + 4a + 8) and 2 bytes for each element of a matrix.

    Each of the two norms keeps its input and its output before the weight in fp32 (8h), rsqrt (4), and a 16-bit copy of its
    output for each linear layer that reads it (6h and 4h). q, k, v, the output and the logsumexp; gate, silu, up and their
    product. The residual in the middle is a norm's input; q and k are 16-bit copies of the rotated ones, which are fp32.
    """
    (a, k), h, f, d, tokens = heads, 64, 96, 12, 2 * 16
    fields = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": h, "intermediate_size": f,
        "num_attention_heads": a, "num_key_value_heads": k, "head_dim": d,
    }  # fmt: skip
    saved = [
        paper.paper_step(
            fields | {"num_hidden_layers": depth}, micro_batch_size=2, seq_len=16, dtype=fp32, autocast=bf16
        ).saved
        for depth in (1, 2)
    ]
    matrices = 2 * h * a * d + 2 * h * k * d + 3 * h * f
    assert saved[1] - saved[0] == tokens * (26 * h + 4 * a * d + 4 * k * d + 8 * f + 4 * a + 8) + 2 * matrices


def test_differences_are_small_and_explained() -> None:
    for case in CASES:
        assert bool(case.differs) == bool(case.why), case.id
        for run in case.differs.values():
            assert all(abs(ours - theirs) <= 0.005 * theirs for ours, theirs in run.values()), case.id


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_two_cases(family: str) -> None:
    assert len({(case.batch, case.seq) for case in step_cases(family)}) >= 2


OLMO_HYBRID: dict[str, Any] = {
    "model_type": "olmo_hybrid", "vocab_size": 100, "pad_token_id": 0, "hidden_size": 128, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
}  # fmt: skip


@pytest.mark.parametrize("positions", [64, 128, 256])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_dynamic_rotation_with_one_head_of_keys_over_real_tensors(precision: str, positions: int) -> None:
    """Below, at and above the positions that a model is made for; fake tensors cannot look at the length."""
    fields = OLMO_HYBRID | {"max_position_embeddings": positions}
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    workload: dict[str, Any] = {"micro_batch_size": 1, "seq_len": 128, "attention": "sdpa", "optimizer": "sgd"}
    real = oracle.training_step(deepcopy(fields), dtype=dtype, real=True, **workload)
    report = memcalc.estimate(fields, precision=precision, **workload)
    assert report.total("saved_activations") == real.saved
    assert report.phases == {"forward": real.forward, "backward": real.backward, "step": real.step}
