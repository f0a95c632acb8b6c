"""Linear layers in fp8, against Transformer Engine's own."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from kernel_bytes import Bytes, replay
from transformer_engine_fp8_oracle import BLACKWELL, HOPPER, Fp8Mode, layer, one_rank

from memcalc.core.autograd import Node, backward
from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import bf16
from memcalc.core.tensor import Memory, Tensor, new_tensor
from memcalc.megatron import fp8_layers
from memcalc.megatron.fp8 import RECIPES, Recipe
from memcalc.megatron.layers import TensorParallel

SEQ, BATCH, IN, OUT = 512, 2, 512, 1280


class Case(NamedTuple):
    recipe: str = "tensorwise"
    capability: tuple[int, int] = HOPPER
    kind: str = "column"
    sequence_parallel: bool = False
    bias: bool = False
    keeps_input: bool = False
    ranks: int = 2
    layer_norm: bool = False
    fused: bool = False

    @property
    def is_column(self) -> bool:
        return self.kind != "row"


class _Module:
    """A module of one weight."""

    def __init__(self, memory: Memory, shape: tuple[int, ...], name: str) -> None:
        self.memory, self.path = memory, name
        self.tensors = {"weight": leaf(memory, shape, f"{name}.weight")}

    def weight(self) -> Tensor:
        return self.tensors["weight"]

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def leaf(memory: Memory, shape: tuple[int, ...], name: str = "operand") -> Tensor:
    out = new_tensor(memory, tuple(Dim("n", n) for n in shape), bf16, name)
    out.node = Node(memory, lambda node, grads: [], ())
    return out


def ours(case: Case) -> tuple[Bytes, Counter[Any]]:
    memory = Memory()
    recipe = Recipe(case.recipe, case.capability >= BLACKWELL)
    own = SEQ // case.ranks if case.sequence_parallel else SEQ
    tp = TensorParallel(case.ranks, case.sequence_parallel, Dim("seq", SEQ), Dim("seq", own), case.fused)
    columns = IN if case.is_column else IN // case.ranks
    rows = OUT // case.ranks if case.is_column else OUT
    m: Any = _Module(memory, (rows, columns), "linear")
    x = leaf(memory, (BATCH, own if case.is_column else SEQ, columns))
    norm = tuple(leaf(memory, (IN,)) for _ in range(1 + case.layer_norm)) if case.kind == "normed" else ()
    bias = leaf(memory, (rows,)) if case.bias else None
    marks = [len(memory.log)]
    if case.is_column:
        out = fp8_layers.column_parallel(m, tp, recipe, x, bias, norm, keeps_input=case.keeps_input)
    else:
        out = fp8_layers.row_parallel(m, tp, recipe, x, keeps_input=case.keeps_input)
    marks.append(len(memory.log))
    backward(out)
    kept, forward = replay(memory, marks[0], marks[1], 0)
    _, peak = replay(memory, marks[1], len(memory.log), kept)
    sent = Counter((s.kind, numel(s.shape)[0] * s.dtype.itemsize) for s in memory.sent)
    return Bytes(kept, forward, peak, 0), sent


def theirs(case: Case) -> tuple[Bytes, Counter[Any]]:
    with one_rank(case.ranks, case.recipe, case.capability) as group:
        norm = {"normalization": "LayerNorm" if case.layer_norm else "RMSNorm"} if case.kind == "normed" else {}
        module = layer(
            "LayerNormLinear" if norm else "Linear", IN, OUT, bias=case.bias, params_dtype=torch.bfloat16, device="cpu",
            tp_group=group, tp_size=case.ranks, sequence_parallel=case.sequence_parallel,
            parallel_mode="column" if case.is_column else "row", fuse_wgrad_accumulation=case.fused, **norm,
        )  # fmt: skip
        for weight in module.parameters():
            weight.main_grad = torch.empty(weight.shape, dtype=torch.float32)
        if case.keeps_input:
            module.save_original_input = True
        own = SEQ // case.ranks if case.sequence_parallel and case.is_column else SEQ
        x = torch.empty(
            own, BATCH, IN if case.is_column else IN // case.ranks, dtype=torch.bfloat16, requires_grad=True
        )
        leaves = [x, *module.parameters()]
        module(x, is_first_microbatch=True)  # makes the weight in fp8, which is kept
        mode = Fp8Mode()
        with mode:
            for tensor in [*leaves, *(weight.main_grad for weight in module.parameters())]:
                mode.register(tensor)
            start = mode.now
            out = module(x, is_first_microbatch=False)
            kept, forward = mode.now - start, mode.highest - start
            mode.begin()
            torch.autograd.grad(out, leaves, torch.empty(out.shape, dtype=out.dtype), allow_unused=True)
        sent = Counter[Any]()
        for (_, kind, size), calls in mode.calls.items():
            if size >= 1024:
                sent[kind, size] += calls
        return Bytes(kept, forward, mode.highest - start, 0), sent


def cases() -> list[Any]:
    out: list[Any] = []
    for recipe in RECIPES:
        for capability in (HOPPER, BLACKWELL):
            for kind in ("column", "normed", "row"):
                for sequence_parallel in (False, True):
                    for bias in (False, True) if kind != "row" else (False,):
                        for keeps in (False, True) if kind != "normed" and recipe != "delayed" else (False,):
                            case = Case(recipe, capability, kind, sequence_parallel, bias, keeps)
                            out.append(case)
    out += [Case(kind="normed", layer_norm=True), Case(ranks=1), Case(kind="row", ranks=1), Case(fused=True)]
    return out


@pytest.mark.parametrize("case", cases(), ids=str)
def test_it_saves_allocates_and_sends_what_the_real_one_does(case: Case) -> None:
    assert ours(case) == theirs(case)


# --- experts


EXPERTS, ROWS, FFN = 4, 1000, 768


class OfExperts(NamedTuple):
    recipe: str = "tensorwise"
    capability: tuple[int, int] = HOPPER
    keeps_input: bool = False
    fused: bool = True


def our_experts(case: OfExperts) -> Bytes:
    memory, recipe = Memory(), Recipe(case.recipe, case.capability >= BLACKWELL)
    m: Any = _Module(memory, (EXPERTS, FFN, IN), "linear_fc1")
    x = leaf(memory, (EXPERTS * SEQ, IN))
    marks = [len(memory.log)]
    out = fp8_layers.grouped_linear(m, recipe, x, fused=case.fused, keeps_input=case.keeps_input)
    marks.append(len(memory.log))
    backward(out)
    kept, forward = replay(memory, marks[0], marks[1], 0)
    return Bytes(kept, forward, replay(memory, marks[1], len(memory.log), kept)[1], 0)


def their_experts(case: OfExperts) -> Bytes:
    with one_rank(1, case.recipe, case.capability):
        module = layer(
            "GroupedLinear", EXPERTS, IN, FFN, bias=False, params_dtype=torch.bfloat16, device="cpu",
            fuse_wgrad_accumulation=case.fused,
        )  # fmt: skip
        module.save_original_input = case.keeps_input
        for weight in module.parameters():
            weight.main_grad = torch.empty(weight.shape, dtype=torch.float32)
        x = torch.empty(EXPERTS * SEQ, IN, dtype=torch.bfloat16, requires_grad=True)
        leaves, splits = [x, *module.parameters()], [SEQ] * EXPERTS
        module(x, splits, is_first_microbatch=True)
        mode = Fp8Mode()
        with mode:
            for tensor in [*leaves, *(weight.main_grad for weight in module.parameters())]:
                mode.register(tensor)
            start = mode.now
            out = module(x, splits, is_first_microbatch=False)
            kept, forward = mode.now - start, mode.highest - start
            mode.begin()
            torch.autograd.grad(out, leaves, torch.empty(out.shape, dtype=out.dtype), allow_unused=True)
        return Bytes(kept, forward, mode.highest - start, 0)


@pytest.mark.parametrize(
    "case",
    [
        OfExperts(recipe, capability, keeps)
        for recipe in RECIPES
        for capability in (HOPPER, BLACKWELL)
        for keeps in ((False, True) if recipe != "delayed" else (False,))
    ]
    + [OfExperts(fused=False)],
    ids=str,
)
def test_experts_save_and_allocate_what_the_real_ones_do(case: OfExperts) -> None:
    assert our_experts(case) == their_experts(case)


def test_rows_are_padded_in_a_copy() -> None:
    """Fp8Padding copies all rows if one expert's are no multiple of 16, and keeps nothing."""
    with one_rank(1, "tensorwise"):
        x, mode = torch.empty(ROWS, IN, dtype=torch.bfloat16, requires_grad=True), Fp8Mode()
        with mode:
            mode.register(x)
            start = mode.now
            out, splits = layer("Fp8Padding", 2)(x, [511, 489])
            assert (out.shape[0], splits) == (1008, [512, 496])
            assert mode.now - start == out.numel() * 2
            assert layer("Fp8Padding", 2)(x, [512, 488 - 8])[0] is x
