"""Linear layers whose weights are 8-bit codes: bitsandbytes' Linear8bitLt (LLM.int8).

A weight is a code a byte, with the largest absolute value of each row (nn/modules.py, Int8Params). Forward quantises the input
row by row, multiplies codes by codes into int32, and scales the result to fp16. It keeps the input, as an attribute of its
node: no hook of saved tensors sees it, so a checkpoint does not free it, and it lives as long as the graph. Backward makes a
copy of the weight in the dtype of the input (autograd/_functions.py, MatMul8bitLt; backends/cuda/ops.py;
backends/default/ops.py).

Columns of the input in which a value exceeds `llm_int8_threshold` are multiplied apart. How many there are depends on the
data. None are counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.dtypes import boolean, fp16, fp32, int8, int32
from memcalc.core.ops.elementwise import cast, like, record
from memcalc.core.ops.matmul import mm
from memcalc.core.ops.shape import contiguous, reshape, transpose, view
from memcalc.core.ops.work import streams, works
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.replacing import Stored
from memcalc.quantized.four_bit import bias_gradient

if TYPE_CHECKING:
    from memcalc.core.autograd import Node
    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType

_SOURCE: Final = "bitsandbytes 0.50 nn/modules.py: Int8Params"
_MULTIPLE: Final = 4
_BATCHED: Final = 3
"""The dims of an input that is folded into rows. One of two dims has rows already."""


class EightBit(NamedTuple):
    """A way to keep a weight in 8 bits."""

    fan_out: Dim
    """The rows of the weight: the layer's outputs."""
    bias_dtype: DType | None
    """The dtype of the layer's input, which its bias takes; None is that of the run."""
    source: str = _SOURCE
    copies_result: bool = False

    def stored(self, shape: Shape) -> tuple[Stored, ...]:
        """Return the tensors that hold a weight of this shape; the first one has its codes."""
        return Stored("", shape, int8), Stored("SCB", (self.fan_out,), fp32)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run Linear8bitLt.forward: x (..., in), weight (out, in), bias (out) -> (..., out), in the dtype of x."""
        memory = x.memory
        outside = memory.grad_enabled, memory.autocast, memory.contexts
        memory.grad_enabled, memory.autocast, memory.contexts = False, None, None
        rows = reshape(x, merge(*x.shape[:-1]), x.shape[-1]) if len(x.shape) == _BATCHED else x
        casts = None if outside[1] is None else outside[1].dtype
        out = view(_product(rows, weight, bias, casts), *x.shape[:-1], weight.shape[0])
        memory.grad_enabled, memory.autocast, memory.contexts = outside
        kept = None if x.node is None else rows
        return record(out, _matmul_8bit_backward, (x,) if bias is None else (x, bias), context=(weight, x.dtype, kept))

    def dequantized(self, weight: Tensor) -> Tensor:
        """Run int8_vectorwise_dequant: return the weight in fp32."""
        scaled = new_tensor(weight.memory, weight.shape, fp32, "codes times scales")
        streams("scale", _codes(weight), scaled)
        out = like(scaled, "copy of the 8-bit weight")
        out.name = weight.name
        streams("scale", scaled, out)
        return out


def _product(a: Tensor, weight: Tensor, bias: Tensor | None, autocast: DType | None) -> Tensor:
    """Run the forward of MatMul8bitLt for rows (t, in) without outliers."""
    codes, scales = _quantized(cast(a, fp16, "input cast for the 8-bit weight"))
    out_i32 = _linear_matmul(codes, weight, autocast)
    return _dequantized(out_i32, scales, bias, a.dtype, weight.name.removesuffix(".weight"))


def _quantized(a: Tensor) -> tuple[Tensor, Tensor]:
    """Run int8_vectorwise_quant of backends/cuda/ops.py: return the codes of rows (t, in) and the scale of each row."""
    row_stats = new_tensor(a.memory, a.shape[:-1], fp32, "scales of the input")
    out_row = new_tensor(a.memory, a.shape, int8, "codes of the input")
    absolute = like(a, "absolute values of the input")
    streams("abs", a, absolute)
    outliers = like(absolute, "outliers of the input", boolean)
    streams("compare", absolute, outliers)
    del absolute
    streams("any", outliers)
    streams("quantise", a, out_row, row_stats)
    return out_row, row_stats


def _linear_matmul(a: Tensor, weight: Tensor, autocast: DType | None) -> Tensor:
    """Run int8_linear_matmul of backends/cuda/ops.py. cuBLASLt multiplies no int8 whose inner dim is no multiple of 4; these are
    multiplied in fp32, which autocast casts."""
    memory, shape, name = a.memory, (*a.shape[:-1], weight.shape[0]), weight.name.removesuffix(".weight")
    out = new_tensor(memory, shape, int32, f"{name} in int32")
    if not a.shape[-1].size % _MULTIPLE:
        works(memory, name, (*shape, a.shape[-1]), int8)
        return out
    computes = autocast or fp32
    product = _float_product(a, weight, computes)
    result = like(product, f"{name} in int32", int32)
    streams("cast", product, result)
    streams("copy", result, out)
    return out


def _float_product(a: Tensor, weight: Tensor, computes: DType) -> Tensor:
    """Return the product of the codes in another dtype than int8."""
    codes = _codes(weight)
    left, right = cast(a, fp32, "codes in fp32"), cast(codes, fp32, "codes in fp32")
    streams("cast", a, left)
    streams("cast", codes, right)
    lower, upper = cast(left, computes, "codes under autocast"), cast(right, computes, "codes under autocast")
    return mm(lower, transpose(upper, 0, 1), name=weight.name.removesuffix(".weight"))


def _dequantized(out_i32: Tensor, row_stats: Tensor, bias: Tensor | None, dtype: DType, name: str) -> Tensor:
    """Run int8_mm_dequant of backends/cuda/ops.py, whose kernel writes fp16."""
    out = like(out_i32, name if dtype is fp16 else f"{name} in fp16", fp16)
    streams("scale", out_i32, row_stats, out)
    if bias is not None and bias.dtype is not fp16:
        streams("add", out, bias)
    result = cast(out, dtype, name)
    if result is not out:
        streams("cast", out, result)
    return result


def _codes(weight: Tensor) -> Tensor:
    """Return the codes of a weight that the program sees in the dtype of the run."""
    return Tensor(weight.storage, weight.shape, weight.strides, int8)


def _matmul_8bit_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    weight, dtype, _kept = node.context
    grad = grads[0]
    grad_bias = bias_gradient(node, grad)
    if len(grad.shape) == _BATCHED:
        grad = contiguous(reshape(grad, merge(*grad.shape[:-1]), grad.shape[-1]))
    return [_input_gradient(node, grad, weight, dtype), grad_bias][: len(node.edges)]


def input_kept_by(node: Node) -> Tensor | None:
    """Return the input that a node keeps as an attribute; None for a node of another op, or one that keeps none."""
    return node.context[2] if node.backward is _matmul_8bit_backward else None


def _input_gradient(node: Node, grad: Tensor, weight: Tensor, dtype: DType) -> Tensor | None:
    if not node.needs(0):
        return None
    copy = _copied(weight, dtype)
    name = f"{weight.name.removesuffix('.weight')} input gradient"
    return view(mm(cast(grad, dtype, "gradient cast"), copy, name=name), *node.metadata[0][0])


def _copied(weight: Tensor, dtype: DType) -> Tensor:
    """Return a copy of the weight that is scaled in place."""
    copy = new_tensor(weight.memory, weight.shape, dtype, "copy of the 8-bit weight")
    scales = new_tensor(weight.memory, (weight.shape[0], ONE_DIM), fp32, "scales of the 8-bit weight")
    streams("cast", _codes(weight), copy)
    streams("scale", copy, scales, copy)
    return copy
