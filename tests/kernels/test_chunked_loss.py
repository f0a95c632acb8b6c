"""`--cross-entropy chunked` on paper against torch's own loop, run as it runs on a GPU."""

from __future__ import annotations

import inspect
import sys
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import oracle
import paper
import pytest
import torch
from cases import step_cases
from kernel_bytes import DTYPES, replay
from oracle import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.modules import linear_cross_entropy
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

import memcalc
from memcalc.core.autograd import Node
from memcalc.core.dims import Dim
from memcalc.core.dtypes import DType, bf16, fp16, fp32, int64
from memcalc.core.tensor import Memory, Tensor, new_tensor
from memcalc.families import supporting
from memcalc.kernels import choose, chunked_loss

CHUNKED = supporting(lambda s: s.chunked_loss)


def as_on_a_gpu() -> Any:
    """torch's file with its one question about the device answered. The product into an fp32 `out` is CUDA's alone: it
    allocates nothing."""
    source = inspect.getsource(linear_cross_entropy)
    question = 'is_cuda = device.type == "cuda"'
    assert question in source
    source = source.replace(question, "is_cuda = True").replace("torch_nn::", "as_on_a_gpu::")
    module = sys.modules["as_on_a_gpu"] = ModuleType("as_on_a_gpu")
    exec(compile(source, "as_on_a_gpu", "exec"), module.__dict__)
    module._ChunkContext.mm = lambda *_, **__: None
    return module._linear_cross_entropy_batch_chunked_accumulator


ACCUMULATE = as_on_a_gpu()


def defaults(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> LinearCrossEntropyOptions:
    """LinearCrossEntropyOptions() as an H100 resolves it."""
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_capability", lambda _: (9, 0)),
    ):
        return LinearCrossEntropyOptions()._adjust(
            num_batches=tokens, in_features=hidden, num_classes=vocab, dtype=dtype, device=torch.device("cuda")
        )


class LinearCrossEntropy(torch.autograd.Function):
    """The custom op around the loop: both gradients come out of forward and are scaled in place in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        o = defaults(*x.shape, len(weight), x.dtype)
        loss, ctx.grad_x, ctx.grad_weight, _ = ACCUMULATE(
            x, weight, target, None, None, "mean", -100, 0.0, o.batch_chunk_size, o.acc_policy, o.acc_dtype,
            True, True, False,
        )  # fmt: skip
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_x, grad_weight = ctx.grad_x, ctx.grad_weight
        del ctx.grad_x, ctx.grad_weight
        return grad_x.mul_(grad), grad_weight.mul_(grad), None


SIZES = [(48, 64, 300), (50, 64, 300), (33, 64, 1000), (16, 64, 64), (20, 64, 50), (1, 8, 30), (257, 8, 513)]


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=str)
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), SIZES)
def test_the_loop_allocates_what_torchs_allocates(tokens: int, hidden: int, vocab: int, dtype: DType) -> None:
    memory = Memory()
    x, weight = (operand(memory, dtype, n, hidden) for n in (tokens, vocab))
    target = new_tensor(memory, (x.shape[0],), int64, "target")
    mark = len(memory.log)
    loss = chunked_loss._linear_cross_entropy(x, weight, target)
    kept = replay(memory, mark, len(memory.log), 0)
    assert loss.node is not None
    assert kept == torch_bytes(tokens, hidden, vocab, DTYPES[dtype])


def operand(memory: Memory, dtype: DType, rows: int, columns: int) -> Tensor:
    tensor = new_tensor(memory, (Dim("rows", rows), Dim("columns", columns)), dtype, "operand")
    tensor.node = Node(memory, lambda node, grads: [], ())
    return tensor


def torch_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[int, int]:
    mode = LiveBytes()
    with FakeTensorMode():
        x = torch.empty(tokens, hidden, dtype=dtype, requires_grad=True)
        weight = torch.empty(vocab, hidden, dtype=dtype, requires_grad=True)
        target = torch.empty(tokens, dtype=torch.int64)
        with mode:
            for tensor in (x, weight, target):
                mode.register(tensor)
            start = mode.now
            mode.begin()
            loss = LinearCrossEntropy.apply(x, weight, target)
            assert loss.dtype == dtype
            return mode.now - start, mode.highest - start


def forward(
    self: Any, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> Any:
    """A model that hands its last hidden states and its head to linear_cross_entropy, with ForCausalLMLoss's shift."""
    outputs = self.base_model(input_ids=input_ids, attention_mask=attention_mask)
    hidden_states = outputs[0]
    shift_labels = F.pad(labels, (0, 1), value=-100)
    shift_labels, _padded = shift_labels[..., 1:].contiguous(), shift_labels
    head = self.get_output_embeddings().weight
    loss = LinearCrossEntropy.apply(hidden_states.view(-1, hidden_states.shape[-1]), head, shift_labels.view(-1))
    return SimpleNamespace(loss=loss)


def with_chunked_loss(model: Any) -> None:
    model.forward = MethodType(forward, model)


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
