"""Megatron-Core's and Transformer Engine's kernels for torch's autograd: what they save and allocate, nothing computed.

Written from Megatron-Core 0.16.1 (megatron/core/fusions, megatron/core/tensor_parallel/cross_entropy.py) and Transformer
Engine 2.11 (pytorch/csrc/extensions/normalization.cpp, pytorch/attention/rope.py, pytorch/cross_entropy.py); the backward
of the fused softmax from apex, csrc/megatron/scaled_upper_triang_masked_softmax_cuda.cu. A norm's workspace is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function


class RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, _rstd = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        statistics = [torch.empty(x.shape[:-1], dtype=torch.float32) for _ in ("mean", "rstd")]
        ctx.save_for_backward(x, weight, *statistics)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, _mean, _rstd = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


class GeLU(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.empty_like(x)


class SwiGLU(Function):
    """Over gate and up, which Megatron has as the halves of one tensor."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return torch.empty_like(gate), torch.empty_like(up)


class Rotated(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(angles)
        return torch.empty(x.shape, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _angles = ctx.saved_tensors
        return torch.empty(grad.shape, dtype=grad.dtype), None


class FlashKernel(Function):
    """flash_attn_func: (batch, seq, heads, head_dim); its backward takes any gradient whose last dim is contiguous."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, _out, _logsumexp = ctx.saved_tensors
        assert grad.stride(-1) == 1
        batch, tokens, heads, width = q.shape
        out = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _sums = torch.empty((batch, heads, tokens), dtype=torch.float32)
        _accumulated = torch.empty((batch, tokens, heads, -(-width // 32) * 32), dtype=torch.float32)
        _of_each_head = [torch.empty_like(q) for _ in range(2) if k.shape[2] != heads]
        return out


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(seq, batch, heads, head_dim) -> (seq, batch, heads·head_dim), as FlashAttention.forward does it for sbhd."""
    first = [x.transpose(0, 1).contiguous() for x in (q, k, v)]
    out = FlashKernel.apply(*first)
    return out.view(q.shape[1], q.shape[0], -1).transpose(0, 1).contiguous()


class MaskedSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(scores)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _result = ctx.saved_tensors
        return grad.contiguous()


class VocabParallelCrossEntropy(Function):
    """One rank of the vocabulary's ranks: the fp32 copy of the logits becomes the softmax, and that the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        vocab = logits.shape[-1]
        softmax = logits.float()
        maximum = softmax.max(dim=-1)[0]
        softmax.sub_(maximum.unsqueeze(-1))
        outside = (target < 0) | (target >= vocab)
        own = target.clone() - 0
        rows = torch.arange(target.numel())
        of_target = softmax.view(-1, vocab)[rows, own.view(-1)]
        of_target = of_target.clone()
        softmax.exp_()
        sums = softmax.sum(-1)
        del rows
        losses = torch.log(sums) - of_target.view_as(target)
        softmax.div_(sums.unsqueeze(-1))
        ctx.save_for_backward(softmax, outside, own.view(-1))
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        softmax, outside, own = ctx.saved_tensors
        rows = torch.arange(own.numel())
        update = 1.0 - outside.view(-1).float()
        flat = softmax.view(-1, softmax.shape[-1])
        of_target = flat[rows, own]
        of_target -= update
        return softmax.mul_(grad.unsqueeze(-1)), None


class Permuted(Function):
    """A row for each copy of a token, by expert (transformer_engine/pytorch/permutation.py, _moe_permute_mask_map)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, rows: int) -> Any:
        row_id_map = torch.empty((x.shape[0], 2 * routing_map.shape[1] + 1), dtype=torch.int32)
        ctx.save_for_backward(row_id_map)
        ctx.like = x.shape, probs.shape
        return torch.empty((rows, x.shape[1]), dtype=x.dtype), torch.empty(rows, dtype=probs.dtype), row_id_map

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, grad_probs: torch.Tensor, _: Any) -> Any:
        _row_id_map = ctx.saved_tensors
        tokens, probs = ctx.like
        return torch.empty(tokens, dtype=grad.dtype), torch.empty(probs, dtype=grad_probs.dtype), None, None


class Unpermuted(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, row_id_map: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        ctx.save_for_backward(row_id_map)
        ctx.rows = rows.shape
        return torch.empty(shape, dtype=rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _row_id_map = ctx.saved_tensors
        return torch.empty(ctx.rows, dtype=grad.dtype), None, None


class SortedChunks(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, probs: torch.Tensor | None) -> Any:
        ctx.save_for_backward(torch.empty(rows.shape[0], dtype=torch.int32))
        return torch.empty_like(rows), None if probs is None else torch.empty_like(probs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, grad_probs: torch.Tensor | None) -> Any:
        _row_id_map = ctx.saved_tensors
        return torch.empty_like(grad), None if grad_probs is None else torch.empty_like(grad_probs)


class GroupedProduct(Function):
    """GroupedLinear (transformer_engine/pytorch/module/grouped_linear.py): weight gradients go into the main gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        return torch.empty((x.shape[0], width), dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        return torch.empty_like(x), None, *(None for _ in weights)


class WeightedSwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weights)
        return torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weights = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weights)


class TopK(Function):
    """torch.topk, with every expert chosen equally often."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: int) -> Any:
        tokens, experts = x.shape
        indices = (torch.arange(tokens * k) % experts).view(tokens, k)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        ctx.like = x.shape
        return torch.empty((tokens, k), dtype=x.dtype), indices

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        _indices = ctx.saved_tensors
        return torch.empty(ctx.like, dtype=grad.dtype), None


class FusedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = torch.zeros(target.numel(), dtype=torch.float32)
        _statistics = torch.zeros(3 * target.numel(), dtype=torch.float32)
        ctx.save_for_backward(logits.detach())
        return losses.view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _one = torch.tensor(1.0)
        return *ctx.saved_tensors, None
