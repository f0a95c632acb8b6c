"""What each op keeps for backward, against torch's own `saved_tensors_hooks` on small tensors."""

from __future__ import annotations

import gc
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from cuda_autocast import cuda_lists_on_the_cpu
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative

from memcalc.core.autograd import Node, backward
from memcalc.core.dims import ONE_DIM, Dim, numel
from memcalc.core.dtypes import DType, bf16, boolean, fp32, int32, int64
from memcalc.core.ops import (
    attention,
    axes,
    complex,
    contraction,
    convolution,
    cumulative,
    elementwise,
    embedding,
    exponential,
    loss,
    matmul,
    norm,
    pooling,
    routing,
    scan,
    selection,
    shape,
    triangular,
)
from memcalc.core.tensor import Autocast, Memory, Tensor, new_tensor
from memcalc.families import bloom, mamba
from memcalc.families.base import blocks, rotary

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES: dict[DType, torch.dtype] = {
    bf16: torch.bfloat16,
    fp32: torch.float32,
    int32: torch.int32,
    int64: torch.int64,
    boolean: torch.bool,
}
TOKENS, FOUR, SIX, EIGHT, TEN = (Dim(name, n) for name, n in (("t", 5), ("a", 4), ("b", 6), ("c", 8), ("d", 10)))


class Arg(NamedTuple):
    """An operand: its dims, dtype, and whether it wants a gradient."""

    dims: tuple[Dim, ...]
    dtype: DType = fp32
    grad: bool = True


class Op(NamedTuple):
    """One op, here and in torch, over the same operands."""

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    args: list[Arg]


def dense(*dims: Dim, dtype: DType = fp32, grad: bool = True) -> Arg:
    return Arg(dims, dtype, grad)


HEADS = (Dim("batch", 2), FOUR, SIX, EIGHT)
GROUPED = (Dim("batch", 2), Dim("kv_heads", 2), SIX, EIGHT)
ONE_HEAD = (HEADS[0], ONE_DIM, SIX, EIGHT)
BOOLEAN_MASK = Arg((HEADS[0], ONE_DIM, SIX, SIX), boolean)
TWO = Dim("k", 2)
THREE = Dim("e", 3)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def masked_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def in_math(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What F.scaled_dot_product_attention takes where no fused kernel takes the operands."""

    def attends(*operands: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend(*operands)

    return attends


def torch_div_(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mul(a, 1).div_(b)


def our_div_(a: Tensor, b: Tensor) -> Tensor:
    return routing.div_(a * 1.0, b)


def torch_copied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a * 1.0
    out[..., 2:4].copy_(b)
    return out


def torch_assigned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a * 1.0
    out[:, 2] = b
    out[:, 3] = b
    return out * a


def torch_bloom_gelu(a: torch.Tensor) -> torch.Tensor:
    from transformers.models.bloom.modeling_bloom import GeLUFunction

    return GeLUFunction.apply(a)


def torch_scan(a: torch.Tensor, u: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The loop of mamba_selective_scan."""
    state = torch.zeros(a.shape[0], a.shape[1], a.shape[3], dtype=c.dtype)
    outputs = []
    for i in range(a.shape[2]):
        state = a[:, :, i] * state + u[:, :, i]
        outputs.append(torch.matmul(state.to(c.dtype), c[:, i, :].unsqueeze(-1))[:, :, 0])
    return torch.stack(outputs, dim=-1)


def our_scan(a: Tensor, u: Tensor, c: Tensor) -> Tensor:
    outputs, _state = mamba.scan(a, u, c, new_tensor(a.memory, (FOUR, SIX, a.shape[2]), c.dtype, "inputs"))
    return scan.stack_steps(outputs, 2, a.shape[2])


def scans(steps: int, dtype: DType) -> list[Arg]:
    seq = Dim("seq", steps)
    return [dense(FOUR, SIX, seq, EIGHT), dense(FOUR, SIX, seq, EIGHT), dense(FOUR, seq, EIGHT, dtype=dtype)]


SCANS = [(steps, dtype) for steps in (1, 2, 3, 7) for dtype in (bf16, fp32)]


def torch_mul_view_(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a * 1.0
    view = out.view(-1)
    view *= b
    return out


OPS: dict[str, Op] = {
    "exp": Op(exponential.exp, torch.exp, [dense(FOUR, SIX)]),
    "expm1": Op(exponential.expm1, torch.expm1, [dense(FOUR, SIX)]),
    "softplus": Op(exponential.softplus, F.softplus, [dense(FOUR, SIX)]),
    "depthwise_conv1d": Op(
        lambda x, w, b: convolution.depthwise_conv1d(x, w, b, 2),
        lambda x, w, b: F.conv1d(x, w, b, padding=2, groups=6),
        [dense(TWO, SIX, TEN), dense(SIX, Dim("1", 1), THREE), dense(SIX)],
    ),
    "convolution": Op(
        lambda x, w, b: convolution.convolution(x, w, b, FOUR, FOUR),
        lambda x, w, b: F.conv2d(x, w, b, stride=2),
        [dense(TWO, SIX, TEN, TEN), dense(FOUR, SIX, THREE, THREE), dense(FOUR)],
    ),
    "cumsum": Op(lambda a: cumulative.cumsum(a, 0), lambda a: a.cumsum(0), [dense(FOUR, SIX)]),
    "solve_triangular": Op(
        lambda a, b: triangular.solve_triangular(a, b) * b,
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True) * b,
        [dense(TWO, FOUR, FOUR), dense(TWO, FOUR, SIX)],
    ),
    "assign_place": Op(
        lambda a, b: axes.assign_place(axes.assign_place(a * 1.0, 1, b), 1, b) * a,
        torch_assigned,
        [dense(FOUR, SIX, EIGHT), dense(FOUR, EIGHT)],
    ),
    "cast_row_major": Op(
        lambda a: elementwise.power(elementwise.cast_row_major(shape.transpose(a, 0, 1), fp32), 2),
        lambda a: a.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format) ** 2,
        [dense(FOUR, SIX, dtype=bf16)],
    ),
    "matmul-five-dims": Op(
        lambda a, b: matmul.matmul(a, b, "product"),
        torch.matmul,
        [dense(TWO, THREE, FOUR, SIX, EIGHT), dense(TWO, THREE, FOUR, EIGHT, TEN)],
    ),
    "einsum": Op(
        lambda a, b: contraction.einsum("bclhn,bclhp->bchpn", a, b),
        lambda a, b: torch.einsum("bclhn,bclhp->bchpn", a, b),
        [dense(TWO, FOUR, SIX, EIGHT, THREE), dense(TWO, FOUR, SIX, EIGHT, TEN)],
    ),
    "repeat_interleave": Op(
        lambda a: axes.repeat_interleave(a, 1, EIGHT) * 2.0 * 1.0,
        lambda a: a.repeat_interleave(2, 1, output_size=8) * 2.0 * 1.0,
        [dense(SIX, FOUR, TWO)],
    ),
    "permuted-product": Op(
        lambda a, b: axes.permute(a, 2, 0, 1) * axes.select(b, 1),
        lambda a, b: a.permute(2, 0, 1) * b[:, 0],
        [dense(FOUR, SIX, TWO), dense(TWO, THREE, FOUR, SIX)],
    ),
    "padded-product": Op(
        lambda a, b: axes.pad_dim(a, 1, SIX) * axes.cat_dim((b, b), 1, SIX),
        lambda a, b: F.pad(a, (0, 2)) * torch.cat((b, b), 1),
        [dense(FOUR, FOUR), dense(FOUR, THREE)],
    ),
    "split_dim": Op(
        lambda a: axes.chunk_dim(a, 0, 2)[0] * axes.narrow(a, 0, TWO),
        lambda a: a.chunk(2, 0)[0] * a[:2],
        [dense(FOUR, SIX)],
    ),
    "unbind": Op(
        lambda a: (lambda parts: parts[0] * parts[1])(axes.unbind(a, 1)),
        lambda a: (lambda parts: parts[0] * parts[1])(a.unbind(1)),
        [dense(FOUR, TWO, SIX)],
    ),
    "add": Op(elementwise.add, torch.add, [dense(FOUR, SIX), dense(SIX)]),
    "sub": Op(elementwise.sub, torch.sub, [dense(FOUR, SIX), dense(FOUR, Dim("1", 1))]),
    "mul": Op(elementwise.mul, torch.mul, [dense(FOUR, SIX), dense(SIX)]),
    "mul-half": Op(elementwise.mul, torch.mul, [dense(FOUR, SIX), dense(FOUR, SIX, grad=False)]),
    "mul-bf16-fp32": Op(elementwise.mul, torch.mul, [dense(FOUR, SIX, dtype=bf16), dense(FOUR, Dim("1", 1))]),
    "scale": Op(lambda a: a * 2.0, lambda a: a * 2.0, [dense(FOUR, SIX)]),
    "add_": Op(lambda a, b: elementwise.add_(a * 1.0, b), lambda a, b: (a * 1.0).add_(b), [dense(FOUR, SIX)] * 2),
    "scale_": Op(lambda a: elementwise.scale_(a * 1.0), lambda a: (a * 1.0).mul_(2.0), [dense(FOUR, SIX)]),
    "maximum-of-two": Op(selection.maximum, torch.max, [dense(FOUR, SIX), dense(grad=False)]),
    "larger": Op(selection.larger, torch.maximum, [dense(FOUR, SIX), dense(FOUR, SIX)]),
    "one_minus": Op(lambda a: elementwise.one_minus(a) * a, lambda a: (1 - a) * a, [dense(FOUR, SIX)]),
    "masked_fill": Op(
        lambda a, mask: selection.where_else(mask, a, "filled"),
        lambda a, mask: a.masked_fill(mask, 1.0),
        [dense(FOUR, SIX), Arg((SIX,), boolean)],
    ),
    "where": Op(
        lambda a, mask: selection.where_else(mask, a, "chosen"),
        lambda a, mask: torch.where(mask, a, torch.tensor(1.0)),
        [dense(FOUR, SIX), Arg((SIX,), boolean)],
    ),
    "where-of-two": Op(
        lambda a, b, condition: selection.where_of_two(condition, a, b),
        lambda a, b, condition: torch.where(condition, a, b),
        [dense(FOUR, SIX), dense(FOUR, SIX), Arg((FOUR, SIX), boolean)],
    ),
    "minimum-of-two": Op(selection.maximum, torch.min, [dense(FOUR, SIX), dense(grad=False)]),
    "bloom-gelu": Op(bloom.bloom_gelu, lambda a: torch_bloom_gelu(a), [dense(FOUR, SIX)]),
    "neg": Op(elementwise.neg, torch.neg, [dense(FOUR, SIX)]),
    "tanh": Op(elementwise.tanh, torch.tanh, [dense(FOUR, SIX)]),
    "sigmoid": Op(elementwise.sigmoid, torch.sigmoid, [dense(FOUR, SIX)]),
    "erf": Op(elementwise.erf, torch.erf, [dense(FOUR, SIX)]),
    "rsqrt": Op(elementwise.rsqrt, torch.rsqrt, [dense(FOUR, SIX)]),
    "power": Op(lambda a: elementwise.power(a, 3), lambda a: torch.pow(a, 3), [dense(FOUR, SIX)]),
    "cast": Op(lambda a: elementwise.cast(a, fp32), torch.Tensor.float, [dense(FOUR, SIX, dtype=bf16)]),
    "mean": Op(elementwise.mean, lambda a: a.mean(-1, keepdim=True), [dense(FOUR, SIX)]),
    "sum": Op(elementwise.sum_last, lambda a: a.sum(-1, keepdim=True), [dense(FOUR, SIX)]),
    "softmax": Op(
        lambda a: elementwise.softmax(a, fp32),
        lambda a: torch.softmax(a, -1, dtype=torch.float32),
        [dense(FOUR, SIX, dtype=bf16)],
    ),
    "embedding": Op(
        embedding.embedding, lambda table, ids: F.embedding(ids, table), [dense(TEN, SIX), dense(FOUR, dtype=int64)]
    ),
    "linear": Op(matmul.linear, F.linear, [dense(TWO, FOUR, SIX), dense(EIGHT, SIX), dense(EIGHT)]),
    "linear-frozen": Op(matmul.linear, F.linear, [dense(FOUR, SIX), dense(EIGHT, SIX, grad=False)]),
    "conv1d": Op(
        matmul.conv1d,
        lambda x, w, b: torch.addmm(b, x.view(-1, x.shape[-1]), w),
        [dense(TWO, FOUR, SIX), dense(SIX, EIGHT), dense(EIGHT)],
    ),
    "mm": Op(matmul.mm, torch.mm, [dense(FOUR, SIX), dense(SIX, EIGHT)]),
    "addmm": Op(
        lambda c, a, b: matmul.addmm(c, a, b, "addmm"), torch.addmm, [dense(EIGHT), dense(FOUR, SIX), dense(SIX, EIGHT)]
    ),
    "bmm": Op(lambda a, b: matmul.bmm(a, b, "bmm"), torch.bmm, [dense(TWO, FOUR, SIX), dense(TWO, SIX, EIGHT)]),
    "matmul": Op(
        lambda a, b: matmul.matmul(a, shape.transpose(b, 2, 3), "product"),
        lambda a, b: torch.matmul(a, b.transpose(2, 3)),
        [Arg(HEADS), Arg(HEADS)],
    ),
    "baddbmm": Op(
        lambda bias, a, b: matmul.baddbmm(bias, a, b, "product"),
        lambda bias, a, b: torch.baddbmm(bias, a, b, alpha=0.5),
        [dense(TWO, FOUR, EIGHT, grad=False), dense(TWO, FOUR, SIX), dense(TWO, SIX, EIGHT)],
    ),
    "baddbmm-bias": Op(
        lambda bias, a, b: matmul.biased_baddbmm(bias, a, b, "product"),
        torch.baddbmm,
        [dense(TWO, ONE_DIM, EIGHT), dense(TWO, FOUR, SIX), dense(TWO, SIX, EIGHT)],
    ),
    "bounded sqrt": Op(elementwise.bounded_sqrt, lambda a: SqrtBoundDerivative.apply(a), [dense(FOUR, SIX)]),
    "batch_norm": Op(
        norm.batch_norm,
        lambda x, w, b, mean, var: F.batch_norm(x, mean, var, w, b, training=True),
        [dense(TWO, SIX, FOUR, EIGHT), dense(SIX), dense(SIX), dense(SIX, grad=False), dense(SIX, grad=False)],
    ),
    "max_pool2d": Op(
        lambda x: pooling.max_pool2d(x, THREE, FOUR),
        lambda x: F.max_pool2d(x, kernel_size=3, stride=2, padding=1),
        [dense(TWO, FOUR, SIX, EIGHT)],
    ),
    "adaptive_avg_pool2d": Op(
        pooling.adaptive_avg_pool2d, lambda x: F.adaptive_avg_pool2d(x, (1, 1)), [dense(TWO, FOUR, SIX, EIGHT)]
    ),
    "layer_norm": Op(
        norm.layer_norm, lambda x, w, b: F.layer_norm(x, (6,), w, b), [dense(FOUR, SIX), dense(SIX), dense(SIX)]
    ),
    "layer_norm-plain": Op(
        lambda x: norm.layer_norm(x, None, None), lambda x: F.layer_norm(x, (6,)), [dense(FOUR, SIX)]
    ),
    "sdpa": Op(
        lambda q, k, v: attention.scaled_dot_product_attention(q, k, v, None),
        sdpa,
        [Arg(HEADS, bf16), Arg(GROUPED, bf16), Arg(GROUPED, bf16)],
    ),
    "sdpa-masked": Op(
        attention.scaled_dot_product_attention,
        masked_sdpa,
        [*[Arg(HEADS, bf16)] * 3, BOOLEAN_MASK],
    ),
    "sdpa-math": Op(
        attention.math_attention, in_math(masked_sdpa), [Arg(HEADS, bf16), *[Arg(ONE_HEAD, bf16)] * 2, BOOLEAN_MASK]
    ),
    "sdpa-math-grouped": Op(
        lambda q, k, v: attention.math_attention(q, k, v, None, True),
        in_math(sdpa),
        [Arg(HEADS, bf16), *[Arg(GROUPED, bf16)] * 2],
    ),
    "sdpa-math-uncausal": Op(
        lambda q, k, v: attention.math_attention(q, k, v, None),
        in_math(F.scaled_dot_product_attention),
        [Arg(HEADS)] * 3,
    ),
    "cross_entropy": Op(loss.cross_entropy, F.cross_entropy, [dense(TOKENS, TEN), dense(TOKENS, dtype=int64)]),
    "cat": Op(
        lambda a, b: shape.cat((a, b), TEN), lambda a, b: torch.cat((a, b), -1), [dense(FOUR, SIX), dense(FOUR, FOUR)]
    ),
    "cat-mixed": Op(
        lambda a, b: elementwise.tanh(shape.cat((a, b), TEN)),
        lambda a, b: torch.tanh(torch.cat((a, b), -1)),
        [dense(FOUR, SIX, dtype=bf16), dense(FOUR, FOUR)],
    ),
    "chunk": Op(lambda a: shape.chunk(a, 2)[0], lambda a: a.chunk(2, -1)[0], [dense(FOUR, SIX)]),
    "slice": Op(lambda a: shape.part(a, FOUR), lambda a: a[..., :4], [dense(FOUR, SIX)]),
    "every_second-interleave": Op(
        lambda a: rotary.rotate_pairs(a) * a,
        lambda a: torch.stack((-a[..., 1::2], a[..., 0::2]), -1).flatten(-2) * a,
        [dense(FOUR, SIX)],
    ),
    "repeat_pairs": Op(
        lambda a, b: a * rotary.repeat_pairs(b),
        lambda a, b: a * b[..., :3].repeat_interleave(2, dim=-1),
        [dense(FOUR, SIX), dense(FOUR, SIX, grad=False)],
    ),
    "every-second": Op(lambda a: shape.every_second(a), lambda a: a[..., ::2], [dense(FOUR, SIX)]),
    "select": Op(lambda a: shape.select(a, 1), lambda a: a.select(1, 2), [dense(FOUR, SIX, EIGHT)]),
    "split-one": Op(lambda a: shape.split_one(a, 0)[0], lambda a: a.split(1, 0)[0], [dense(FOUR, SIX)]),
    "stack": Op(
        lambda a, b: shape.stack((a, b), TWO),
        lambda a, b: torch.stack((a, b), -1),
        [dense(FOUR, SIX), dense(FOUR, SIX, grad=False)],
    ),
    "stack-mixed": Op(
        lambda a, b: elementwise.tanh(shape.stack((a, b), TWO)),
        lambda a, b: torch.tanh(torch.stack((a, b), -1)),
        [dense(FOUR, SIX, dtype=bf16), dense(FOUR, SIX)],
    ),
    "copying-reshape": Op(
        lambda a: shape.reshape(shape.transpose(a, 0, 1), Dim("all", 24)),
        lambda a: a.transpose(0, 1).reshape(24),
        [dense(FOUR, SIX)],
    ),
    "topk": Op(lambda a: routing.topk(a, TWO)[0], lambda a: torch.topk(a, 2)[0], [dense(FOUR, SIX)]),
    "clamp_": Op(lambda a: selection.clamp_(a * 1.0, 2), lambda a: torch.mul(a, 1).clamp_(-1, 1), [dense(FOUR, SIX)]),
    "index_one": Op(lambda a: routing.index_one(a, 1, "entry"), lambda a: a[:, [3], :], [dense(FOUR, SIX, EIGHT)]),
    "div_": Op(our_div_, torch_div_, [dense(FOUR, SIX), dense(FOUR, Dim("1", 1))]),
    "index": Op(
        lambda a, where: routing.index(a, where, "rows"),
        lambda a, w: a[w],
        [dense(FOUR, SIX), dense(EIGHT, dtype=int64)],
    ),
    "mul_": Op(
        lambda a, b: elementwise.mul_(a * 1.0, b),
        lambda a, b: (a * 1.0).mul_(b),
        [dense(FOUR, SIX), dense(FOUR, SIX, grad=False)],
    ),
    "over": Op(elementwise.over, torch.div, [dense(FOUR, SIX), dense(grad=False)]),
    "masked_fill_": Op(
        lambda a, m: selection.masked_fill_(a * 1.0, m),
        lambda a, m: (a * 1.0).masked_fill_(m, 0.0),
        [dense(FOUR, SIX), dense(FOUR, SIX, dtype=boolean)],
    ),
    "mul_view_": Op(
        lambda a, b: elementwise.mul_view_(a * 1.0, b),
        torch_mul_view_,
        [dense(FOUR, SIX), dense(Dim("all", 24), grad=False)],
    ),
    "clamp": Op(lambda a: selection.clamp(a, 2), lambda a: a.clamp(-1, 1), [dense(FOUR, SIX)]),
    "clamp_to": Op(selection.clamp_to, torch.clamp, [dense(FOUR, SIX), dense(grad=False), dense(grad=False)]),
    "clamp_-max": Op(lambda a: selection.clamp_(a * 1.0, 1), lambda a: (a * 1.0).clamp_(max=1), [dense(FOUR, SIX)]),
    "every_second": Op(lambda a: shape.every_second(a) * 1.0, lambda a: a[..., ::2] * 1.0, [dense(FOUR, SIX)]),
    "copy_into": Op(lambda a, b: shape.copy_into(a * 1.0, b), torch_copied, [dense(FOUR, SIX), dense(FOUR, TWO)]),
    "gather": Op(routing.gather, lambda a, w: a.gather(-1, w), [dense(FOUR, SIX), dense(FOUR, TWO, dtype=int64)]),
    "masked_fill-routing": Op(
        routing.masked_fill, lambda a, m: a.masked_fill(m, 0.0), [dense(FOUR, SIX), dense(FOUR, SIX, dtype=boolean)]
    ),
    "scatter": Op(
        routing.scatter, lambda a, w: a.scatter(-1, w, 0.0), [dense(FOUR, SIX), dense(FOUR, TWO, dtype=int64)]
    ),
    "scatter_": Op(
        routing.scatter_,
        lambda a, w, s: a.scatter_(-1, w, s),
        [dense(FOUR, SIX, grad=False), dense(FOUR, TWO, dtype=int64), dense(FOUR, TWO)],
    ),
    "add_-routing": Op(lambda a, b: routing.add_(a * 1.0, b), lambda a, b: (a * 1.0).add_(b), [dense(FOUR, SIX)] * 2),
    "div": Op(routing.div, torch.div, [dense(FOUR, SIX), dense(FOUR, Dim("1", 1))]),
    "maximum": Op(routing.maximum, lambda a: a.max(dim=-1).values, [dense(FOUR, SIX)]),
    "index_two": Op(
        routing.index_two,
        lambda a, first, second: a[first, second],
        [dense(FOUR, SIX, EIGHT), dense(TEN, dtype=int64), dense(TEN, dtype=int64)],
    ),
    "index_add_": Op(
        lambda a, w, s: routing.index_add_(a * 1.0, w, s),
        lambda a, w, s: (a * 1.0).index_add_(0, w, s),
        [dense(FOUR, SIX), dense(TEN, dtype=int64), dense(TEN, SIX)],
    ),
    "absolute_norm": Op(routing.absolute_norm, lambda a: torch.norm(a, p=1, dim=-1, keepdim=True), [dense(FOUR, SIX)]),
    "repeat_rows": Op(lambda a: routing.repeat_rows(a, THREE), lambda a: a.repeat(3, 1), [dense(FOUR, SIX)]),
    "repeat": Op(lambda a: axes.repeat(a, THREE), lambda a: a.repeat(3, 1, 1), [dense(FOUR, SIX, EIGHT)]),
    "repeat-once": Op(lambda a: axes.repeat(a, ONE_DIM), lambda a: a.repeat(1, 1, 1), [dense(FOUR, SIX, EIGHT)]),
    "sum_first": Op(routing.sum_first, lambda a: a.sum(0), [dense(FOUR, TWO, SIX)]),
    "complex": Op(
        lambda a, b: complex.view_as_real(complex.turn(complex.view_as_complex(a), complex.view_as_complex(b))),
        lambda a, b: torch.view_as_real(torch.view_as_complex(a) * torch.view_as_complex(b)),
        [dense(FOUR, SIX, TWO), dense(SIX, TWO, grad=False)],
    ),
    "sum_middle": Op(routing.sum_middle, lambda a: a.sum(1), [dense(FOUR, TWO, SIX)]),
    "grouped_mm": Op(
        lambda a, b, offsets: routing.grouped_mm(a, shape.transpose(b, 1, 2), offsets, "experts"),
        lambda a, b, offsets: F.grouped_mm(a, b.transpose(1, 2), offs=offsets),
        [dense(FOUR, EIGHT, dtype=bf16), dense(THREE, Dim("n", 16), EIGHT, dtype=bf16), dense(THREE, dtype=int32)],
    ),
    "rms_norm-like": Op(
        lambda a, w: w * elementwise.cast(a * elementwise.rsqrt(elementwise.mean(elementwise.power(a, 2))), bf16),
        lambda a, w: w * (a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True))).to(torch.bfloat16),
        [dense(FOUR, SIX), dense(SIX, dtype=bf16)],
    ),
}


def our_args(memory: Memory, args: list[Arg]) -> list[Tensor]:
    tensors = [new_tensor(memory, arg.dims, arg.dtype, "operand") for arg in args]
    for tensor, arg in zip(tensors, args, strict=True):
        if arg.grad and arg.dtype.is_floating_point:
            tensor.node = Node(memory, lambda node, grads: [], ())
    return tensors


def our_bytes(op: Op) -> Counter[int]:
    """Bytes of each storage that is saved somewhere in the graph."""
    return saved_bytes(op.ours(*our_args(Memory(), op.args)))


def saved_bytes(out: Tensor) -> Counter[int]:
    storages = {}
    stack, seen = [out.node], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.edges]
        storages |= {tensor.storage.index: tensor.storage for tensor in node.saved}
    rows = [storage.memory.rows[index] for index, storage in storages.items()]
    return Counter(numel(row.shape)[0] * row.dtype.itemsize for row in rows)


def torch_args(args: list[Arg]) -> list[torch.Tensor]:
    made = []
    for arg in args:
        sizes = [dim.size for dim in arg.dims]
        tensor = torch.zeros(sizes, dtype=DTYPES[arg.dtype])
        made.append(tensor.requires_grad_(arg.grad) if arg.dtype.is_floating_point else tensor)
    return made


def torch_bytes(op: Op) -> Counter[int]:
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    args = torch_args(op.args)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        op.theirs(*args)
    return Counter(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("name", OPS)
def test_an_op_saves_what_torch_saves(name: str) -> None:
    assert our_bytes(OPS[name]) == torch_bytes(OPS[name])


UNCAST = {
    "absolute_norm",
    "complex",
    "cumsum",
    "depthwise_conv1d",
    "exp",
    "expm1",
    "sdpa-math",
    "softplus",
    "solve_triangular",
    "sum_first",
}
"""Ops of families that are refused under autocast."""


@pytest.mark.parametrize("dtype", [None, fp32, bf16], ids=str)
@pytest.mark.parametrize("name", [name for name in OPS if name not in UNCAST])
def test_an_op_casts_what_autocast_casts(name: str, dtype: DType | None) -> None:
    """What is saved and the result's dtype, for operands as the table has them, all in fp32, and all in 16 bits."""
    args = OPS[name].args
    if dtype is not None:
        args = [arg._replace(dtype=dtype) if arg.dtype.is_floating_point else arg for arg in args]
    memory, results = Memory(), []
    with Autocast(memory, bf16):
        out = OPS[name].ours(*our_args(memory, args))
    theirs = Op(OPS[name].ours, lambda *tensors: results.append(OPS[name].theirs(*tensors)), args)
    with cuda_lists_on_the_cpu(), torch.autocast("cpu", torch.bfloat16):
        saved = torch_bytes(theirs)
    assert (saved_bytes(out), DTYPES[out.dtype]) == (saved, results[0].dtype)


@pytest.mark.parametrize(("steps", "dtype"), SCANS, ids=[f"{steps}-{dtype}" for steps, dtype in SCANS])
def test_a_scan_keeps_as_many_bytes_as_its_loop(steps: int, dtype: DType) -> None:
    op = Op(our_scan, torch_scan, scans(steps, dtype))
    ours, theirs = our_bytes(op), torch_bytes(op)
    assert sum(size * count for size, count in ours.items()) == sum(size * count for size, count in theirs.items())


@pytest.mark.parametrize("name", [*blocks.ONE_KERNEL, *blocks.COMPOSED])
def test_an_activation_saves_what_torch_saves(name: str) -> None:
    from transformers.activations import ACT2FN

    op = Op(lambda x: blocks.act(x, name), ACT2FN[name], [dense(FOUR, SIX)])
    assert our_bytes(op) == torch_bytes(op)


def test_dropout_saves_a_bool_mask_as_on_cuda() -> None:
    op = Op(lambda a: elementwise.dropout(a, 0.1), lambda a: torch.native_dropout(a, 0.1, True)[0], [dense(FOUR, SIX)])
    assert our_bytes(op) == torch_bytes(op) == Counter({24: 1})


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", OPS)
def test_a_graph_goes_with_its_output(name: str, back: bool) -> None:
    """No node keeps itself alive, and a backward leaves nothing behind: storages are freed by counting references."""
    memory = Memory()
    args = our_args(memory, OPS[name].args)
    before = alive(memory)
    gc.disable()
    try:
        out = OPS[name].ours(*args)
        assert alive(memory) != before or out.storage is args[0].storage
        if back:
            backward(out)
        del out
        assert alive(memory) == before
    finally:
        gc.enable()


def alive(memory: Memory) -> int:
    """How many storages there are."""
    return sum(1 if event >= 0 else -1 for event in memory.log)
