"""Megatron's fused element-wise kernels around a layer's linears (megatron/core/fusions)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dtypes import boolean
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.tensor import new_tensor

if TYPE_CHECKING:
    from memcalc.core.dims import Dim
    from memcalc.core.tensor import Tensor


def bias_activation(x: Tensor, bias: Tensor | None, ffn: Dim, name: str) -> Tensor:
    """Run bias_swiglu_impl or bias_gelu_impl. It saves its input (and the bias). squared_relu (core/activations.py,
    compiled) saves its input."""
    out = new_tensor(x.memory, (*x.shape[:-1], ffn), x.dtype, name)
    inputs = (x,) if bias is None else (x, bias)
    if recording(*inputs):
        out.node = Node(x.memory, _activation_backward, inputs, inputs)
    return out


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
    """Run bias_dropout_add_fused_train: one kernel. It saves the dropout's mask."""
    out = like(residual, "bias, dropout and residual added")
    saved = (like(x, "dropout mask", boolean),) if p else ()
    inputs = (x, residual) if bias is None else (x, residual, bias)
    if recording(*inputs):
        out.node = Node(x.memory, _bias_dropout_add_backward, inputs, saved, p)
    return out


def _activation_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    x, *bias = node.unpack()
    grad = like(x, "activation gradient")
    return [grad, *(like(b, "bias gradient") for b in bias)]


def _bias_dropout_add_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _mask = node.unpack()
    grad = grads[0]
    grad_x = like(grad, "dropout gradient") if node.context else grad
    bias = [new_tensor(node.memory, (grad.shape[-1],), grad.dtype, "bias gradient")] if len(node.edges) == 3 else []
    return [grad_x, grad, *bias]
