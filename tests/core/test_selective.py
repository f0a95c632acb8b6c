"""Selective checkpointing (`--recompute op`) against torch's own, over transformers' models: to the byte."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import oracle
import paper
import per_op as per_op_module
import pytest
import torch
from cases import Case, step_cases
from kernel_bytes import Arg, Kernel, in_torch, on_paper
from per_op import CHECKPOINTS, per_op_contexts
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext
from traces import traced

import memcalc
from memcalc.core.checkpoint import checkpoint
from memcalc.core.dtypes import DType, bf16, fp32
from memcalc.core.ops.elementwise import activation, neg
from memcalc.core.ops.matmul import mm
from memcalc.core.selective import PRODUCT, per_op
from memcalc.core.tensor import Tensor
from memcalc.tracing import selective
from memcalc.tracing.selective import context_fn


@pytest.mark.parametrize("contexts", [context_fn(per_op), per_op_contexts])
def test_the_second_run_is_answered_as_the_first_one(contexts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 asks the policy in both; a layer of Llama has an odd number of products."""
    asked: list[Any] = []
    for module in (selective, per_op_module):
        monkeypatch.setattr(module, "create_selective_checkpoint_contexts", asked.append)
    contexts()
    first, second = (
        [asked[0](SelectiveCheckpointContext(is_recompute=again), torch.ops.aten.mm.default) for _ in range(7)]
        for again in (False, True)
    )
    assert first == second == [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE] * 3 + first[:1]


FAMILIES = (
    "qwen2",  # products with biases, which are not kept
    "qwen3",
    "mistral",
    "mixtral",
    "gpt2",  # no product without a bias
    "phi3",  # q, k and v of one product
    "falcon",
    "bloom",
    "deepseek_v3",  # memory-efficient attention
    "qwen2_moe",
    "dbrx",  # a product for each expert
    "gpt_oss",
    "llama4_text",
    "rwkv",
    "recurrent_gemma",  # layers that keep a part of what was recomputed
    "zamba2",  # a checkpoint within another
    "qwen3_next",
    "t5",  # two stacks, a bias that wants a gradient
    "whisper",
    "modernbert",
    "deberta-v2",
)
RUNS = [
    *((case, kind) for case in step_cases("llama") for kind in ("sdpa", "eager")),
    *((case, "eager") for case in step_cases("gemma2")),
    (step_cases("mamba")[1], "eager"),  # a bias that is added to a product
    *((case, paper.program_of(case.fields).attention_kinds[0]) for case in (step_cases(f)[0] for f in FAMILIES)),
]
DTYPES: dict[DType, torch.dtype] = {bf16: torch.bfloat16, fp32: torch.float32}


def check(case: Case, attention: str, **options: Any) -> None:
    run: dict[str, Any] = {
        "attention": attention,
        "recompute": "op",
        "micro_batch_size": case.batch,
        "seq_len": case.seq,
    }
    dtype, autocast = options.pop("dtype", bf16), options.pop("autocast", None)
    real = oracle.training_step(
        deepcopy(case.fields), dtype=DTYPES[dtype], autocast=DTYPES[autocast] if autocast else None, optimizer="sgd",
        balanced=case.balanced, real=case.real or case.balanced, **run, **options,
    )  # fmt: skip
    ours = paper.paper_step(case.fields, dtype=dtype, autocast=autocast, **run, **options)
    start = real.resident
    assert ours.flops == real.flops
    assert (ours.saved, ours.forward - ours.start, ours.backward - ours.start) == (
        real.saved,
        real.forward - start,
        real.backward - start,
    )


@pytest.mark.parametrize(("case", "attention"), RUNS, ids=[f"{case.id}-{kind}" for case, kind in RUNS])
def test_a_step_is_the_real_one(case: Case, attention: str) -> None:
    check(case, attention)


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
@pytest.mark.parametrize(
    "options",
    [{"dtype": fp32, "autocast": bf16}, {"dtype": fp32}, {"padded": True}],
    ids=["autocast", "fp32", "padded"],
)
def test_a_step_of_other_tensors_is_the_real_one(model_type: str, options: dict[str, Any]) -> None:
    case = step_cases(model_type)[0]
    # grouped products of fake tensors take bf16 only
    check(case._replace(real=model_type == "mixtral" and not options.get("padded")), "sdpa", **options)


@pytest.mark.parametrize("real", [False, True])
def test_fake_tensors_are_counted_as_real_ones(real: bool) -> None:
    check(step_cases("llama")[1]._replace(real=real), "sdpa")


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_trace_is_the_program(model_type: str) -> None:
    case = step_cases(model_type)[0]
    workload: dict[str, Any] = {"micro_batch_size": case.batch, "seq_len": case.seq, "recompute": "op"}
    trace, ours = memcalc.estimate(traced(case.fields), **workload), memcalc.estimate(case.fields, **workload)
    assert trace.phases == ours.phases
    assert trace.total("saved_activations") == ours.total("saved_activations")


# --- what a layer keeps


def test_what_a_layer_of_llama_keeps() -> None:
    """Its input, q, v, gate, the attention's output and logsumexp, and the product of down_proj, which nobody asks for."""
    h, q, kv, heads, ffn = 4096, 4096, 1024, 32, 14336
    report = memcalc.estimate("llama-3-8b", precision="bf16", micro_batch_size=2, seq_len=4096, recompute="op")
    tokens = 2 * 4096
    rows = [i for i in report.items if i.component == "saved_activations" and i.name.startswith("model.layers.")]
    assert sum(i.nbytes for i in rows) == 32 * tokens * (2 * (h + q + kv + ffn + q + h) + 4 * heads) - 2 * tokens * h
    # the first layer's input is the embedding's


@pytest.mark.parametrize(
    "engine", [{}, {"gpus": 4}, {"gpus": 4, "zero": 2}, {"gpus": 4, "zero": 3, "engine": "fsdp2"}], ids=str
)
def test_it_lies_between_none_and_full_with_every_engine(engine: dict[str, Any]) -> None:
    reports = [
        memcalc.estimate("llama-3-8b", micro_batch_size=2, seq_len=8192, recompute=recompute, **engine)
        for recompute in ("none", "op", "full")
    ]
    saved = [report.total("saved_activations") for report in reports]
    assert saved[0] > saved[1] > saved[2]
    alone = memcalc.estimate("llama-3-8b", micro_batch_size=2, seq_len=8192, recompute="op")
    assert saved[1] == alone.total("saved_activations")
    assert reports[0].phases["backward"] > reports[1].phases["backward"] > reports[2].phases["backward"]


# --- the contexts, in a chain of products: which are kept, when they go

SQUARE = (Arg((32, 32)), Arg((32, 32)))


def our_chain(products: int, nested: bool, x: Tensor, w: Tensor) -> Tensor:
    def step(x: Tensor) -> Tensor:
        return activation(mm(activation(mm(x, w), "silu"), w), "silu")

    def function(x: Tensor) -> Tensor:
        for _ in range(products // 2):
            x = checkpoint(x.memory, step, x, policy=per_op) if nested else step(x)
        return activation(mm(x, w), "silu") if products % 2 else x

    return neg(checkpoint(x.memory, function, x, policy=per_op))


def real_chain(products: int, nested: bool, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    silu = torch.nn.functional.silu

    def step(x: torch.Tensor) -> torch.Tensor:
        return silu(silu(x.mm(w)).mm(w))

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(products // 2):
            x = torch.utils.checkpoint.checkpoint(step, x, **CHECKPOINTS["op"]) if nested else step(x)
        return silu(x.mm(w)) if products % 2 else x

    return torch.utils.checkpoint.checkpoint(function, x, preserve_rng_state=False, **CHECKPOINTS["op"]).neg()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("products", [1, 2, 3, 4, 5, 8])
def test_a_chain_of_products(products: int, nested: bool) -> None:
    kernel = Kernel(partial(our_chain, products, nested), partial(real_chain, products, nested), SQUARE)
    assert on_paper(kernel) == in_torch(kernel)


def test_every_second_product_is_kept_the_first_one_included() -> None:
    assert [per_op(PRODUCT, call) for call in range(4)] == [True, False, True, False]
    assert not per_op("addmm", 0)


# --- what is refused


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        ("llama-7b", {"kernels": "megatron", "recompute": "op"},
         "--recompute op: is not what Megatron does; allowed: none, selective, full"),
        ("llama-7b", {"gpus": 2, "tp": 2, "recompute": "op"},
         "--recompute op: is not what Megatron does; allowed: none, selective, full"),
        ("llama-7b", {"kernels": "fused", "recompute": "op"},
         "--recompute op: with kernels fused is not modelled by this version; allowed: none, full"),
        ("llama-7b", {"recompute": "selective"},
         "--recompute selective: recomputes core attention alone, which Megatron does; allowed: none, op, full"),
        ({"model_type": "ctrl"}, {"recompute": "op"},
         "--recompute op: transformers does not offer it for ctrl; allowed: none"),
    ],
)  # fmt: skip
def test_what_is_refused(model: Any, options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, seq_len=16, **options)
    assert str(error.value) == line
