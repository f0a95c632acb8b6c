# pyright: basic
"""torch's linear_cross_entropy in the place of transformers' head and loss: torch's own loop, which is told that it runs
on a GPU of compute capability 9.0."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

if TYPE_CHECKING:
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

_QUESTION: Final = 'is_cuda = device.type == "cuda"'
_NAME: Final = "linear_cross_entropy_on_a_gpu"


@cache
def _loop() -> Any:
    """Return the loop over chunks. A product into an fp32 `out` is CUDA's alone: here it does nothing."""
    from torch.nn.modules import linear_cross_entropy  # since torch 2.13: everything else runs with older ones, too

    source = inspect.getsource(linear_cross_entropy)
    assert _QUESTION in source
    source = source.replace(_QUESTION, "is_cuda = True").replace("torch_nn::", f"{_NAME}::")
    module = sys.modules[_NAME] = ModuleType(_NAME)
    exec(compile(source, _NAME, "exec"), module.__dict__)
    module._ChunkContext.mm = lambda *_, **__: None
    return module._linear_cross_entropy_batch_chunked_accumulator


def _defaults(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> LinearCrossEntropyOptions:
    """Return LinearCrossEntropyOptions() as an H100 resolves it."""
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_capability", lambda _: (9, 0)),
    ):
        return LinearCrossEntropyOptions()._adjust(
            num_batches=tokens, in_features=hidden, num_classes=vocab, dtype=dtype, device=torch.device("cuda")
        )


class LinearCrossEntropy(torch.autograd.Function):
    """The custom op around the loop: gradients come out of forward and are scaled in place in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        tokens, hidden = x.shape
        o = _defaults(tokens, hidden, len(weight), x.dtype)
        loss, ctx.grad_x, ctx.grad_weight, _ = _loop()(
            x, weight, target, None, None, "mean", -100, 0.0, o.batch_chunk_size, o.acc_policy, o.acc_dtype,
            *ctx.needs_input_grad[:2], False,
        )  # fmt: skip
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_x, grad_weight = ctx.grad_x, ctx.grad_weight
        del ctx.grad_x, ctx.grad_weight
        wanted = zip((grad_x, grad_weight), ctx.needs_input_grad, strict=False)
        return *(of.mul_(grad) if wants else None for of, wants in wanted), None


def _forward(
    self: Any, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> Any:
    """Hand the last hidden states and the head to linear_cross_entropy, with ForCausalLMLoss's shift."""
    outputs = self.base_model(input_ids=input_ids, attention_mask=attention_mask)
    hidden_states = outputs[0]
    shift_labels = functional.pad(labels, (0, 1), value=-100)
    shift_labels, _padded = shift_labels[..., 1:].contiguous(), shift_labels
    head = self.get_output_embeddings().weight
    loss = LinearCrossEntropy.apply(hidden_states.view(-1, hidden_states.shape[-1]), head, shift_labels.view(-1))
    return CausalLMOutput(loss=loss)


def with_chunked_loss(model: Any) -> None:
    """Replace the forward of a causal language model."""
    model.forward = MethodType(_forward, model)
