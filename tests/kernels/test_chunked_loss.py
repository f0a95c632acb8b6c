"""`--cross-entropy chunked` on paper against torch's own loop, run as it runs on a GPU."""

from __future__ import annotations

from typing import Any

import oracle
import paper
import pytest
import torch
from cases import step_cases
from kernel_bytes import DTYPES, replay
from oracle import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode

import memcalc
from memcalc.core.autograd import Node
from memcalc.core.dims import Dim
from memcalc.core.dtypes import DType, bf16, fp16, fp32, int64
from memcalc.core.tensor import Memory, Tensor, new_tensor
from memcalc.families import supporting
from memcalc.kernels import choose, chunked_loss
from memcalc.validate.linear_loss import LinearCrossEntropy, with_chunked_loss

CHUNKED = supporting(lambda s: s.chunked_loss)


SIZES = [(48, 64, 300), (50, 64, 300), (33, 64, 1000), (16, 64, 64), (20, 64, 50), (1, 8, 30), (257, 8, 513)]


@pytest.mark.slow
@pytest.mark.parametrize("trains", [(True, True), (True, False)], ids=["both", "frozen-head"])
@pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=str)
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), SIZES)
def test_the_loop_allocates_what_torchs_allocates(
    tokens: int, hidden: int, vocab: int, dtype: DType, trains: tuple[bool, bool]
) -> None:
    memory = Memory()
    x, weight = (
        operand(memory, dtype, n, hidden, wants=wants) for n, wants in zip((tokens, vocab), trains, strict=True)
    )
    target = new_tensor(memory, (x.shape[0],), int64, "target")
    mark = len(memory.log)
    loss = chunked_loss._linear_cross_entropy(x, weight, target)
    kept = replay(memory, mark, len(memory.log), 0)
    assert loss.node is not None
    assert kept == torch_bytes(tokens, hidden, vocab, DTYPES[dtype], trains)


def operand(memory: Memory, dtype: DType, rows: int, columns: int, *, wants: bool) -> Tensor:
    tensor = new_tensor(memory, (Dim("rows", rows), Dim("columns", columns)), dtype, "operand")
    if wants:
        tensor.node = Node(memory, lambda node, grads: [], ())
    return tensor


def torch_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, trains: tuple[bool, bool]) -> tuple[int, int]:
    mode = LiveBytes()
    with FakeTensorMode():
        x = torch.empty(tokens, hidden, dtype=dtype, requires_grad=trains[0])
        weight = torch.empty(vocab, hidden, dtype=dtype, requires_grad=trains[1])
        target = torch.empty(tokens, dtype=torch.int64)
        with mode:
            for tensor in (x, weight, target):
                mode.register(tensor)
            start = mode.now
            mode.begin()
            loss = LinearCrossEntropy.apply(x, weight, target)
            assert loss.dtype == dtype
            return mode.now - start, mode.highest - start


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
@pytest.mark.parametrize("model_type", CHUNKED)
def test_a_step_with_it(model_type: str, dtype: DType) -> None:
    case = step_cases(model_type)[0]
    workload: dict[str, Any] = {"micro_batch_size": case.batch, "seq_len": case.seq, "recompute": True}
    replaced = dict(choose(model_type, "hf", "chunked").replaced)
    ours = paper.paper_step(case.fields, dtype=dtype, kernels=replaced, **workload)
    theirs = oracle.training_step(
        dict(case.fields),
        dtype=DTYPES[dtype],
        real=model_type == "mixtral" and dtype is fp32,
        patch=with_chunked_loss,
        **workload,
    )
    assert (ours.saved, ours.forward - ours.start, ours.backward - ours.start) == (
        theirs.saved, theirs.forward - theirs.resident, theirs.backward - theirs.resident,
    )  # fmt: skip


def test_an_estimate_with_it() -> None:
    options: dict[str, Any] = {"precision": "bf16", "seq_len": 8192, "recompute": "full"}
    plain = memcalc.estimate("llama-3-8b", **options)
    chunked = memcalc.estimate("llama-3-8b", cross_entropy="chunked", **options)
    assert chunked.phases["forward"] < plain.phases["forward"] - 8 * 8192 * 128256
