"""Linear layers whose weights are 4-bit codes: bitsandbytes' Linear4bit.

A weight is two codes a byte, with the largest absolute value of each block of 64 (functional.py, quantize_4bit). Double
quantization keeps these values as bytes, with the largest value of each 256. Forward makes a copy of the weight in the dtype
of the computation and multiplies by it; backward makes another one. Neither keeps the input. The node keeps the
codes as an attribute (autograd/_functions.py, MatMul4Bit; backends/cuda/ops.py, _dequant_linear_fallback).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import ONE_DIM, Dim, numel
from memcalc.core.dtypes import fp32, uint8
from memcalc.core.ops.elementwise import cast, record
from memcalc.core.ops.matmul import linear, matmul, mm, times
from memcalc.core.ops.shape import reshape
from memcalc.core.ops.work import streams
from memcalc.core.tensor import Streamed, new_tensor
from memcalc.families.base.replacing import Stored

if TYPE_CHECKING:
    from memcalc.core.autograd import Node
    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Memory, Tensor

_SOURCE: Final = "bitsandbytes 0.50 functional.py: quantize_4bit"
_BLOCK: Final = 64
"""The elements of a weight that share a scale."""
_NESTED_BLOCK: Final = 256
"""The scales that share a scale of their own."""
_CODES: Final = Dim("codes", 16)
_NESTED_CODES: Final = Dim("codes", 256)


class FourBit(NamedTuple):
    """A way to keep a weight in 4 bits, and the dtypes that it is multiplied in."""

    nested: bool
    """True for double quantization."""
    computes: DType
    """The dtype of the products in forward (`bnb_4bit_compute_dtype`)."""
    original: DType
    """The dtype that the weight had, in which backward makes its copy."""
    storage: DType = uint8
    """The dtype of the tensor that holds the codes (`bnb_4bit_quant_storage`)."""
    source: str = _SOURCE
    copies_result: bool = True

    @property
    def bias_dtype(self) -> DType:
        """Return the dtype that the layer's bias takes in its first forward (nn/modules.py, Linear4bit.forward)."""
        return self.computes

    def stored(self, shape: Shape) -> tuple[Stored, ...]:
        """Return the tensors that hold a weight of this shape; the first one has its codes."""
        elements = numel(shape)[0]
        blocks = Dim("blocks", -(-elements // _BLOCK))
        codes = Stored("", (self._packed(elements), ONE_DIM), self.storage)
        table = Stored("quant_map", (_CODES,), fp32)
        if not self.nested:
            return codes, Stored("absmax", (blocks,), fp32), table
        nested = Dim("blocks", -(-blocks.size // _NESTED_BLOCK))
        return (
            codes,
            Stored("absmax", (blocks,), uint8),
            table,
            Stored("nested_absmax", (nested,), fp32),
            Stored("nested_quant_map", (_NESTED_CODES,), fp32),
            Stored("nested_offset", (), fp32),
        )

    def _packed(self, elements: int) -> Dim:
        """Return the elements of the tensor that holds the codes (backends/cuda/ops.py, quantize_4bit)."""
        if self.storage is uint8:
            return Dim("pairs", -(-elements // 2))
        return Dim(f"codes/{2 * self.storage.itemsize}", (elements + 1) // (2 * self.storage.itemsize))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run Linear4bit.forward: x (..., in), weight (out, in), bias (out) -> (..., out)."""
        out = self._matmul_4bit(cast(x, self.computes, "input cast for the 4-bit weight"), weight, bias)
        return cast(out, x.dtype, "cast of the 4-bit product")

    def _matmul_4bit(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        memory = x.memory
        outside = memory.grad_enabled, memory.autocast, memory.contexts
        memory.grad_enabled, memory.autocast, memory.contexts = False, None, None
        out = self._dequant_linear(x, weight, bias)
        memory.grad_enabled, memory.autocast, memory.contexts = outside
        codes = None if x.node is None or memory.visitor is None else memory.visitor.gathered(weight)
        inputs = (x,) if bias is None else (x, bias)
        return record(out, _matmul_4bit_backward, inputs, context=(self, weight, codes))

    def _dequant_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by a copy of the weight. The function's variables hold the scales and the copy until it returns."""
        memory = x.memory
        blocks = (self.stored(weight.shape)[1].shape[0],)
        if self.nested:
            _absmax_dq = new_tensor(memory, blocks, fp32, "scales of the 4-bit weight")
            _absmax = new_tensor(memory, blocks, fp32, "scales of the 4-bit weight")
        return linear(x, self._copy(memory, weight, self.computes), bias)

    def dequantized(self, weight: Tensor) -> Tensor:
        """Run dequantize_4bit: return the weight in the dtype that it had."""
        memory = weight.memory
        if self.nested:
            _absmax = new_tensor(memory, self.stored(weight.shape)[1].shape, fp32, "scales of the 4-bit weight")
        return self._copy(memory, weight, self.original)

    def _copy(self, memory: Memory, weight: Tensor, dtype: DType) -> Tensor:
        copy = new_tensor(memory, weight.shape, dtype, "copy of the 4-bit weight")
        copy.name = weight.name
        read = tuple((part.shape, part.dtype) for part in self.stored(weight.shape))
        phase = "recomputation" if memory.recomputing else memory.phase
        written = (weight.shape, dtype)
        memory.streamed.append(Streamed(memory.scope, "dequantize", phase, memory.layer, (*read, written)))
        return copy


def _matmul_4bit_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    grad = grads[0]
    grad_bias = bias_gradient(node, grad)
    return [_input_gradient(node, grad), grad_bias][: len(node.edges)]


def _input_gradient(node: Node, grad: Tensor) -> Tensor | None:
    if not node.needs(0):
        return None
    packing, weight, _codes = node.context
    name = f"{weight.name.removesuffix('.weight')} input gradient"
    return _times(grad, cast(packing.dequantized(weight), grad.dtype, "cast of the weight"), name)


def bias_gradient(node: Node, grad: Tensor) -> Tensor | None:
    """Return the gradient of the bias, a node's second input, summed over the first dim alone. Autograd sums it over the
    others."""
    if len(node.edges) == 1 or not node.needs(1):
        return None
    dtype = node.metadata[1][1]
    out = new_tensor(node.memory, grad.shape[1:], dtype, "bias gradient")
    streams("sum", grad, out)
    return out


def _times(a: Tensor, b: Tensor, name: str) -> Tensor:
    """Compute `torch.matmul` of (..., n) and (n, k), neither of which requires a gradient: one product if the rows of `a` can be
    a view, else one for each of the batch (should_fold in aten/src/ATen/native/LinearAlgebra.cpp)."""
    if len(a.shape) == 2:
        return mm(a, b, name=name)
    if all(a.strides[i] == a.strides[i + 1] * a.shape[i + 1].size for i in range(len(a.shape) - 2)):
        return times(a, b, name)
    return matmul(a, reshape(b, *(ONE_DIM,) * (len(a.shape) - 2), *b.shape), name)
