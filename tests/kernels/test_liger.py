"""`--kernels fused` on paper against transformers' models with stand-ins for Liger-Kernel's functions: to the byte."""

from __future__ import annotations

import contextlib
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import liger_stand_ins
import oracle
import paper
import pytest
import torch
from cases import Case, step_cases
from kernel_bytes import Arg, Kernel, in_torch, on_paper
from records import on_record

import memcalc
from memcalc.core.dtypes import DType, bf16, fp32, int64
from memcalc.core.ops.elementwise import add
from memcalc.core.ops.shape import chunk, transpose
from memcalc.core.tensor import Tensor
from memcalc.families import supporting
from memcalc.kernels import choose, liger, refusal
from memcalc.kernels.liger import loss_chunk

PATCHES = supporting(lambda s: s.liger)

if TYPE_CHECKING:
    pass

DTYPES: dict[DType, torch.dtype] = {bf16: torch.bfloat16, fp32: torch.float32}


def takes_liger(case: Case) -> bool:
    config = paper.program_of(case.fields).config
    return refusal("fused", case.model_type, config) is None


CASES = [case for model_type in PATCHES for case in step_cases(model_type) if takes_liger(case)]


def kinds(case: Case) -> tuple[str, ...]:
    return paper.program_of(case.fields).attention_kinds


RUNS = [
    pytest.param(case, dtype, kind, recompute, id=f"{case.id}-{dtype}-{kind}-{'full' if recompute else 'none'}")
    for case in CASES
    for dtype, kind, recompute in (
        *((bf16, kind, recompute) for kind in kinds(case) for recompute in (False, True)),
        (fp32, kinds(case)[0], False),
    )
]


@on_record
def step_with_liger(
    fields: dict[str, Any], dtype: torch.dtype, *, layers: bool, loss: bool, **workload: Any
) -> oracle.Step:
    """transformers' step with the stand-ins in place of its layers' functions, of its loss or of both."""
    patch = partial(liger_stand_ins.patch, layers=layers, loss=loss)
    with liger_stand_ins.rotated(fields["model_type"]) if layers else contextlib.nullcontext():
        return oracle.training_step(deepcopy(fields), dtype=dtype, patch=patch, **workload)


def both(
    case: Case, dtype: DType, attention: str, recompute: bool, kernels: str, loss: str, *, padded: bool = False
) -> list[tuple[int, ...]]:
    """Saved bytes and both peaks above the start, on paper and of the oracle."""
    workload: dict[str, Any] = {
        "micro_batch_size": case.batch, "seq_len": case.seq, "attention": attention, "recompute": recompute,
        "padded": padded,
    }  # fmt: skip
    replaced = dict(choose(case.model_type, kernels, loss).replaced)
    ours = paper.paper_step(case.fields, dtype=dtype, kernels=replaced, **workload)
    theirs = step_with_liger(case.fields, DTYPES[dtype], layers=kernels == "fused", loss=loss == "fused", **workload)
    return [
        (step.saved, step.forward - start, step.backward - start)
        for step, start in ((ours, ours.start), (theirs, theirs.resident))
    ]


@pytest.mark.parametrize(("case", "dtype", "attention", "recompute"), RUNS)
def test_a_step_with_liger(case: Case, dtype: DType, attention: str, recompute: bool) -> None:
    on_paper, real = both(case, dtype, attention, recompute, "fused", "fused")
    assert on_paper == real


# --- each kernel: a step's peaks are elsewhere than in most of them

X, WEIGHT, HALF, ROWS = Arg((3, 16, 8)), Arg((8,)), Arg((3, 16, 24)), Arg((48, 8))
BY_TOKEN, BY_HEAD, ANGLES = Arg((3, 16, 4, 8)), Arg((3, 4, 16, 8)), Arg((1, 16, 8), grad=False)


def our_rope(q: Tensor, k: Tensor, cos: Tensor) -> Tensor:
    return add(*liger.apply_rotary_pos_emb(q, k, cos, cos))


def their_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    return torch.add(*liger_stand_ins.Rotated.apply(q, k, cos, cos))


KERNELS: dict[str, Kernel] = {
    "rms_norm": Kernel(
        lambda x, w: liger._rms_norm(x, w, in_place=True),
        lambda x, w: liger_stand_ins.RMSNorm.apply(x, w, True),
        (X, WEIGHT),
    ),
    "rms_norm-kept-fp32": Kernel(
        lambda x, w: liger._rms_norm(x, w, in_place=False),
        lambda x, w: liger_stand_ins.RMSNorm.apply(x, w, False),
        (X._replace(dtype=fp32), WEIGHT._replace(dtype=fp32)),
    ),
    "gated": Kernel(lambda a, b: liger.gated_halves(a, b, "silu"), liger_stand_ins.Gated.apply, (HALF, HALF)),
    "gated-halves": Kernel(
        lambda x: liger.gated_halves(*chunk(x, 2), "silu"),
        lambda x: liger_stand_ins.Gated.apply(*x.chunk(2, -1)),
        (HALF,),
    ),
    "rotary-by-token": Kernel(
        lambda q, k, cos: our_rope(transpose(q, 1, 2), transpose(k, 1, 2), cos),
        lambda q, k, cos: their_rope(q.transpose(1, 2), k.transpose(1, 2), cos),
        (BY_TOKEN, BY_TOKEN, ANGLES),
    ),
    "rotary-by-head": Kernel(our_rope, their_rope, (BY_HEAD, BY_HEAD, ANGLES)),
    "linear_cross_entropy": Kernel(
        liger._linear_cross_entropy,
        liger_stand_ins.LinearCrossEntropy.apply,
        (ROWS, Arg((300, 8)), Arg((48,), int64, grad=False)),
    ),
    "linear_cross_entropy-fp32": Kernel(
        liger._linear_cross_entropy,
        liger_stand_ins.LinearCrossEntropy.apply,
        (ROWS._replace(dtype=fp32), Arg((300, 8), fp32), Arg((48,), int64, grad=False)),
    ),
}


@pytest.mark.parametrize("model_type", PATCHES)
def test_a_padded_step_with_liger(model_type: str) -> None:
    case = step_cases(model_type)[0]
    on_paper, real = both(case, bf16, kinds(case)[0], False, "fused", "fused", padded=True)
    assert on_paper == real


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_saves_and_allocates_what_ligers_does(name: str) -> None:
    assert on_paper(KERNELS[name]) == in_torch(KERNELS[name])


# --- what goes with what


@pytest.mark.parametrize(("kernels", "loss"), [("hf", "fused"), ("fused", "eager")])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_the_loss_is_a_choice_of_its_own(model_type: str, kernels: str, loss: str) -> None:
    case = step_cases(model_type)[0]
    on_paper, real = both(case, bf16, kinds(case)[0], False, kernels, loss)
    assert on_paper == real


@pytest.mark.parametrize(
    ("tokens", "vocab", "hidden", "chunk"),
    [(16384, 32000, 4096, 2048), (8192, 128256, 4096, 256), (100, 50, 64, 100), (1, 300, 64, 1), (48, 300, 64, 16)],
)
def test_chunks(tokens: int, vocab: int, hidden: int, chunk: int) -> None:
    """The first is the example in Liger's source."""
    assert loss_chunk(tokens, vocab, hidden) == chunk


@pytest.mark.parametrize("model_type", PATCHES)
def test_every_kernel_of_a_patch_is_called(model_type: str) -> None:
    """A program that does not call a function that is replaced would silently keep transformers' own."""
    called: set[str] = set()

    def noted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(function.__qualname__)
            return function(*args, **kwargs)

        return call

    kernels = choose(model_type, "fused", "fused")
    replaced = {own: noted(other) for own, other in kernels.replaced}
    for case in step_cases(model_type):
        if takes_liger(case):
            paper.paper_step(case.fields, micro_batch_size=2, seq_len=8, dtype=bf16, kernels=replaced)
    expected = {"rms_norm", "gated", "apply_rotary_pos_emb", "lm_head_loss"}
    expected = {"gated_halves" if name == "gated" and model_type == "phi3" else name for name in expected}
    assert {"rms_norm" if name == "rms_norm_kept" else name for name in called} == expected


def test_what_a_real_model_saves_with_it() -> None:
    """Per layer and token of Llama-3-8B in bf16: two norms (input 2h, rstd 4, output 2h), q, k, v, the attention's output
    and logsumexp, and gate, up and their product."""
    h, q, kv, heads, ffn = 4096, 4096, 1024, 32, 14336
    layer = 2 * (4 * h + 4) + 2 * (q + 2 * kv) + 2 * q + 4 * heads + 3 * 2 * ffn
    report = memcalc.estimate("llama-3-8b", kernels="fused", precision="bf16", micro_batch_size=2, seq_len=4096)
    saved = sum(
        item.nbytes for item in report.items if item.component == "saved_activations" and "layers.*" in item.name
    )
    assert saved == 32 * 2 * 4096 * layer


def test_the_logits_are_never_there() -> None:
    """transformers' forward peaks with 10 bytes per token and word (bf16 logits, fp32 logits, log-probabilities), the loss
    and the targets' total weight, and the final norm's fp32 copy of its input; Liger's with both gradients, a chunk of
    logits, and a loss and a flag per token."""
    options: dict[str, Any] = {"precision": "bf16", "recompute": "full", "seq_len": 8192}
    plain = memcalc.estimate("llama-3-8b", **options)
    fused = memcalc.estimate("llama-3-8b", kernels="fused", **options)
    tokens, vocab, hidden = 8192, 128256, 4096
    of_transformers = 10 * tokens * vocab + 8 + 4 * tokens * hidden
    of_liger = 2 * (vocab + tokens) * hidden + 2 * loss_chunk(tokens, vocab, hidden) * vocab + 5 * tokens
    assert plain.phases["forward"] - fused.phases["forward"] == of_transformers - of_liger
