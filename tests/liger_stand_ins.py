"""Liger-Kernel for the oracle: autograd functions that save and allocate what its own do on a GPU, and compute nothing.

Written from Liger-Kernel 0.8.5, src/liger_kernel/ops: rms_norm.py, swiglu.py, geglu.py, rope.py and
fused_linear_cross_entropy.py (the branches of a GPU of compute capability 8.0 or newer with 132 multiprocessors), put in
place as transformers/monkey_patch.py and transformers/model/llama.py put them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional as F

MULTIPROCESSORS = 132


class RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, in_place: bool) -> torch.Tensor:
        shape = x.shape
        x = x.contiguous().view(-1, shape[-1])
        out = torch.empty_like(x)
        rstd = torch.empty(len(x), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        ctx.in_place = in_place
        return out.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous()
        _x, weight, _rstd = ctx.saved_tensors
        partial = torch.empty(MULTIPROCESSORS, len(weight), dtype=torch.float32)
        grad_x = grad if ctx.in_place else torch.zeros_like(grad)
        return grad_x, partial.sum(0).to(weight.dtype), None


class Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate.view(-1, gate.shape[-1]), up.view(-1, up.shape[-1]))
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous()
        gate, up = ctx.saved_tensors
        return gate.view(grad.shape), up.view(grad.shape)


class Rotated(Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return by_token(q), by_token(k)

    @staticmethod
    def backward(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor) -> Any:
        return by_token(grad_q), by_token(grad_k), None, None


def by_token(x: torch.Tensor) -> torch.Tensor:
    """Packed as (batch, seq, heads, width), seen as (batch, heads, seq, width); written in place where it is that already."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        (tokens, hidden), vocab = x.shape, len(weight)
        share = -(-tokens // -(-vocab // hidden))
        chunk = min(1 << (share - 1).bit_length(), tokens)
        grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
        losses = torch.zeros(tokens, dtype=torch.float32)
        counted = target != -100
        counted.sum()
        logits = torch.empty(chunk, vocab, dtype=x.dtype)
        for start in range(0, tokens, chunk):
            rows = x[start : start + chunk]
            part = logits[: len(rows)]
            torch.mm(rows, weight.t(), out=part)
            torch.mm(part, weight, out=grad_x[start : start + chunk])
            if weight.dtype == torch.float32:
                grad_weight += torch.mm(part.t(), rows)
            else:
                torch.addmm(grad_weight, part.t(), rows, out=grad_weight)
        del logits, part
        ctx.save_for_backward(grad_x.detach(), grad_weight.detach())
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _one = torch.tensor(1.0)  # what the gradient of the loss is compared with
        return *ctx.saved_tensors, None


def patch(model: torch.nn.Module, *, layers: bool = True, loss: bool = True) -> None:
    """What `apply_liger_kernel_to_*` does to a model that is there; rotary positions are `rotated()`'s."""
    gemma = model.config.model_type == "gemma2"
    for name, module in model.named_modules():
        if layers and type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(lambda self, x: RMSNorm.apply(x, self.weight, not gemma), module)
        elif layers and name.endswith(".mlp"):
            module.forward = MethodType(joined_mlp if hasattr(module, "gate_up_proj") else mlp, module)
    if loss:
        model.forward = MethodType(forward, model)


def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(Gated.apply(self.gate_proj(x), self.up_proj(x)))


def joined_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    both = self.gate_up_proj(x)
    gate, both = both.chunk(2, dim=-1)
    return self.down_proj(Gated.apply(gate, both))


def forward(
    self: Any, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> Any:
    """The forward of a causal language model that never makes its logits."""
    outputs = self.model(input_ids=input_ids, attention_mask=attention_mask)
    hidden_states = outputs[0]
    loss = shifted_loss(hidden_states, self.lm_head.weight, labels)
    return SimpleNamespace(loss=loss, outputs=outputs.past_key_values)


def shifted_loss(hidden_states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    labels = F.pad(labels, (0, 1), value=-100)
    shift_labels = labels[..., 1:].contiguous()
    return LinearCrossEntropy.apply(hidden_states.view(-1, hidden_states.shape[-1]), weight, shift_labels.view(-1))


@contextlib.contextmanager
def rotated(model_type: str) -> Iterator[None]:
    """Rotary positions are a function of the modelling file."""
    modeling = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    own = modeling.apply_rotary_pos_emb
    modeling.apply_rotary_pos_emb = lambda q, k, cos, sin, *_, **__: Rotated.apply(q, k, cos, sin)
    try:
        yield
    finally:
        modeling.apply_rotary_pos_emb = own
