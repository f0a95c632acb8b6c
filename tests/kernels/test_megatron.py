"""`--kernels megatron`: each kernel against a stand-in for the real one, and Korthikanti et al. 2022 (arXiv 2205.05198)."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import megatron_stand_ins as stand_ins
import paper
import pytest
import torch
from kernel_bytes import Arg, Kernel, in_torch, on_paper

import memcalc
from memcalc.core.dims import numel
from memcalc.core.dtypes import DType, bf16, fp16, fp32, int64
from memcalc.core.ops.shape import transpose
from memcalc.core.tensor import StorageRow, Tensor
from memcalc.kernels import choose, megatron

# --- each kernel

X, WEIGHT, TARGET, LOGITS = Arg((3, 16, 8)), Arg((8,)), Arg((3, 16), int64, grad=False), Arg((3, 16, 50))
HEADS, ANGLES, SCORES = Arg((3, 4, 16, 8)), Arg((1, 16, 8), grad=False), Arg((3, 4, 16, 16))


def flash(batch: int) -> Kernel:
    """8 tokens, 4 heads, 2 key/value heads of 16; as (batch, seq, …) on paper and (seq, batch, …) there."""

    def ours(*qkv: Tensor) -> Tensor:
        return megatron.te_flash_attention(*(transpose(x, 1, 2) for x in qkv))

    def theirs(*qkv: torch.Tensor) -> torch.Tensor:
        return stand_ins.flash_attention(*(x.view(8, batch, -1, 16) for x in qkv))

    return Kernel(ours, theirs, (Arg((batch, 8, 4, 16)), Arg((batch, 8, 2, 16)), Arg((batch, 8, 2, 16))))


KERNELS: dict[str, Kernel] = {
    "flash": flash(3),
    "flash-one-sequence": flash(1),
    "rms_norm": Kernel(lambda x, w: megatron._norm(x, (w,), ("rstd",)), stand_ins.RMSNorm.apply, (X, WEIGHT)),
    "layer_norm": Kernel(megatron.layer_norm, stand_ins.LayerNorm.apply, (X, WEIGHT, WEIGHT)),
    "gelu": Kernel(lambda x: megatron.act(x, "gelu"), stand_ins.GeLU.apply, (X,)),
    "gated": Kernel(megatron._gated, stand_ins.SwiGLU.apply, (X, X)),
    "rotary": Kernel(lambda x, a: megatron.rotated(x, a, a), stand_ins.Rotated.apply, (HEADS, ANGLES)),
    "softmax": Kernel(megatron.masked_softmax, stand_ins.MaskedSoftmax.apply, (SCORES,)),
    "cross_entropy": Kernel(
        megatron._cross_entropy, stand_ins.VocabParallelCrossEntropy.apply, (LOGITS, TARGET)
    ),
    "cross_entropy-fp32": Kernel(
        megatron._cross_entropy, stand_ins.VocabParallelCrossEntropy.apply, (LOGITS._replace(dtype=fp32), TARGET)
    ),
    "fused_cross_entropy": Kernel(
        megatron._fused_cross_entropy, stand_ins.FusedCrossEntropy.apply, (LOGITS, TARGET)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_saves_and_allocates_what_the_real_one_does(name: str) -> None:
    kernel = KERNELS[name]
    real = in_torch(kernel)
    if name.startswith("flash"):  # the stand-in multiplies nothing: two products and five
        real = real._replace(flops=7 * 2 * kernel.args[0].sizes[0] * 4 * 8 * 8 * 16)
    assert on_paper(kernel) == real


# --- Korthikanti et al. 2022: bytes of one layer, b sequences of s tokens, hidden size h, a heads, 16 bits


class Size(NamedTuple):
    b: int
    s: int
    h: int
    a: int

    @property
    def sbh(self) -> int:
        return self.s * self.b * self.h

    @property
    def core(self) -> int:
        """5as²b: softmax, its dropout's mask and output."""
        return 5 * self.a * self.s**2 * self.b

    @property
    def statistics(self) -> int:
        """Mean and rstd of two norms in fp32, which the paper leaves out."""
        return 2 * 2 * 4 * self.s * self.b


SIZES = [Size(2, 32, 64, 8), Size(1, 64, 48, 4), Size(4, 20, 60, 3)]
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


@cache
def run(size: Size, layers: int, recompute: str, dtype: DType, attention: str = "eager") -> paper.PaperRun:
    """A GPT with dropout 0.1 everywhere, as the paper's."""
    fields = {
        "model_type": "gpt2", "vocab_size": 100, "n_layer": layers, "n_embd": size.h, "n_head": size.a,
        "n_positions": size.s, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
    }  # fmt: skip
    kernels = choose("gpt2", "megatron", "vocab-parallel", selective=recompute == "selective")
    return paper.PaperRun(
        paper.program_of(fields, dropout=True), size.b, size.s, dtype, attention,
        recompute=recompute == "full", kernels=dict(kernels.replaced),
    )  # fmt: skip


def layer(size: Size, recompute: str, dtype: DType = bf16, attention: str = "eager") -> int:
    """Saved bytes that one more layer adds."""
    deep, shallow = (run(size, layers, recompute, dtype, attention) for layers in (3, 2))
    return saved(deep) - saved(shallow)


def saved(of: paper.PaperRun) -> int:
    return sum(numel(row.shape)[0] * row.dtype.itemsize for row in kept_rows(of))


@cache
def kept_rows(of: paper.PaperRun) -> tuple[StorageRow, ...]:
    """Activations that are alive at the end of forward."""
    memory = of.memory
    of.step()
    end = next(place for place, phase, _ in memory.segments if phase == "backward")
    alive: set[int] = set()
    for event in memory.log[:end]:
        (alive.add if event >= 0 else alive.discard)(event if event >= 0 else ~event)
    return tuple(memory.rows[i] for i in sorted(alive) if memory.rows[i].component == "activation")


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
@sizes
def test_a_layer_without_recomputation(size: Size, dtype: DType) -> None:
    """sbh(34 + 5as/h)"""
    assert layer(size, "none", dtype) - size.statistics == 34 * size.sbh + size.core


@sizes
def test_its_parts(size: Size) -> None:
    """Attention 11sbh + 5as²b, MLP 19sbh, norms 4sbh. A norm's output is what the linear layer after it saves."""
    parts: Counter[str] = Counter()
    for row in kept_rows(run(size, 3, "none", bf16)):
        if row.layer == 1:
            parts[part(row)] += numel(row.shape)[0] * row.dtype.itemsize
    assert parts == {
        "attention": 11 * size.sbh + size.core,
        "mlp": 19 * size.sbh,
        "norms": 4 * size.sbh,
        "statistics": size.statistics,
    }


def part(row: StorageRow) -> str:
    if row.name in ("norm mean", "norm rstd"):
        return "statistics"
    if row.name == "add":
        return "norms"
    return "attention" if row.scope.split(".")[-1] in ("attn", "ln_1") else "mlp"


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
@sizes
def test_selective_recomputation(size: Size, dtype: DType) -> None:
    """34sbh"""
    assert layer(size, "selective", dtype) - size.statistics == 34 * size.sbh


@sizes
def test_full_recomputation(size: Size) -> None:
    """2sbh"""
    assert layer(size, "full") == 2 * size.sbh


@sizes
def test_the_fused_attention_keeps_a_number_per_query_and_head_instead(size: Size) -> None:
    extra = 4 * size.a * size.s * size.b
    assert layer(size, "none", attention="sdpa") - size.statistics == 34 * size.sbh + extra
    assert layer(size, "selective", attention="sdpa") - size.statistics == 34 * size.sbh - 2 * size.sbh + 2 * size.sbh


@pytest.mark.parametrize(("name", "percent"), [("gpt3-175b", 70), ("mt-nlg", 65)])
def test_what_selective_recomputation_saves(name: str, percent: int) -> None:
    """Section 5 of the paper: 70 % of GPT-3's activations and 65 % of MT-NLG's."""
    mt_nlg = {"model_type": "gpt2", "n_embd": 20480, "n_head": 128, "n_layer": 105, "n_positions": 2048}
    model: Any = mt_nlg if name == "mt-nlg" else name
    layers = [
        sum(item.nbytes for item in report.items if item.component == "saved_activations" and ".h.*" in item.name)
        for report in (
            memcalc.estimate(model, kernels="megatron", attention="eager", seq_len=2048, recompute=recompute)
            for recompute in ("none", "selective")
        )
    ]
    assert round(100 - 100 * layers[1] / layers[0]) == percent


# --- the whole step of Megatron-Core's own GPTModel

RECORDED = {"none": (719_436, 737_356), "selective": (473_676, 491_596), "full": (78_912, None)}
"""Saved bytes and the peak of forward of Megatron-Core 0.16.1's GPTModel (local spec, bf16, learned positions, dropout 0.1,
3 layers, h 64, a 8, vocabulary 128) at b 2, s 32, traced on a CPU with torch 2.13. Its fused kernels were replaced by
functions that allocate their results. With full recomputation its forward keeps no graph, which ours does."""


@pytest.mark.parametrize("recompute", RECORDED)
def test_a_recorded_run(recompute: str) -> None:
    """On the CPU mean and rstd take 2 bytes and each layer has a scale of 4; Megatron's position ids are the batch's."""
    size = Size(2, 32, 64, 8)
    fields = {"model_type": "gpt2", "vocab_size": 128, "n_layer": 3, "n_embd": 64, "n_head": 8, "n_positions": 32}
    kernels = choose("gpt2", "megatron", "vocab-parallel", selective=recompute == "selective")
    step = paper.PaperRun(
        paper.program_of(fields, dropout=True), size.b, size.s, bf16, "eager",
        recompute=recompute == "full", kernels=dict(kernels.replaced),
    ).step()  # fmt: skip
    final_norm, position_ids = size.statistics // 4, 8 * size.s
    layers = 0 if recompute == "full" else 3 * (size.statistics // 2 - 4)
    more = layers + final_norm + position_ids
    saved_bytes, forward = RECORDED[recompute]
    assert step.saved - more == saved_bytes
    if forward is not None:
        assert step.forward - step.start - more == forward


# --- the loss in a step


@pytest.mark.parametrize(("loss", "logits"), [("vocab-parallel", 4), ("fused", 2)])
def test_what_a_loss_keeps_of_the_logits(loss: str, logits: int) -> None:
    """An fp32 copy, or the logits themselves with the gradient written over them."""
    kept = memcalc.estimate("llama-3-8b", kernels="megatron", cross_entropy=loss, seq_len=4096)
    tokens, vocab = 4096, 128256
    of_vocab = [
        item
        for item in kept.items
        if item.component == "saved_activations" and ["vocab", vocab] in map(list, item.shape)
    ]
    assert sum(item.nbytes for item in of_vocab) == logits * tokens * vocab


def test_a_layer_of_a_llama() -> None:
    """Two norms (input and output 2h, rstd 4), q, k, v and the attention's output, a logsumexp, gate, up, their product."""
    tokens, h, q, kv, heads, ffn = 2 * 4096, 4096, 4096, 1024, 32, 14336
    layer = 2 * (4 * h + 4) + 2 * (2 * q + 2 * kv) + 4 * heads + 6 * ffn
    report = memcalc.estimate("llama-3-8b", kernels="megatron", micro_batch_size=2, seq_len=4096)
    kept = [item for item in report.items if item.component == "saved_activations" and "layers.*" in item.name]
    assert sum(item.nbytes for item in kept) == 32 * tokens * layer


def test_attention_keeps_a_buffer_of_scores() -> None:
    def buffers(**options: Any) -> int:
        return memcalc.estimate("gpt2", seq_len=512, micro_batch_size=2, **options).total("buffers")

    eager = buffers(kernels="megatron", attention="eager")
    assert eager - buffers(kernels="megatron", attention="sdpa") == 2 * 2 * 12 * 512 * 512


def test_every_kernel_is_called() -> None:
    """By llama's program or gpt2's, with either attention."""
    called: set[str] = set()

    def noted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(function.__name__)
            return function(*args, **kwargs)

        return call

    for model_type, fields in (
        ("llama", {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 50}),
        ("gpt2", {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 50}),
    ):
        for attention in ("eager", "sdpa"):
            for selective in (False, True):
                kernels = choose(model_type, "megatron", "vocab-parallel", selective=selective)
                paper.paper_step(
                    {"model_type": model_type, **fields}, micro_batch_size=2, seq_len=8, dtype=bf16, attention=attention,
                    kernels={own: noted(other) for own, other in kernels.replaced},
                )  # fmt: skip
    assert called == {
        "rms_norm", "layer_norm", "act", "gated", "apply_rotary_pos_emb", "core_attention", "core_attention_recomputed",
        "fused_attention", "fused_attention_recomputed", "no_mask", "vocab_parallel_cross_entropy",
    }  # fmt: skip
