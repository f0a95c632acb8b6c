"""Elementwise ops and reductions over the last dim.

Sources of what each op saves and what its backward allocates: tools/autograd/derivatives.yaml and FunctionsManual.cpp.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dims import ONE_DIM, Dim, Shape
from memcalc.core.dtypes import DType, boolean, fp32
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.replaceable import replaceable
from memcalc.core.ops.strides import elementwise_strides
from memcalc.core.tensor import Tensor, contiguous_strides, is_dense, new_tensor, same_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence


@lru_cache(maxsize=8192)
def broadcast(left: Shape, right: Shape) -> Shape:
    """Return the shape of an elementwise op over two shapes. Raises ValueError if they do not broadcast."""
    if same_sizes(left, right):
        return left
    long, short = (left, right) if len(left) >= len(right) else (right, left)
    lead = len(long) - len(short)
    return long[:lead] + tuple(_wider(a, b) for a, b in zip(long[lead:], short, strict=True))


def _wider(a: Dim, b: Dim) -> Dim:
    if a.size != b.size and 1 not in (a.size, b.size):
        raise ValueError(f"{a} and {b} do not broadcast")
    return b if a.size == 1 else a


def like(tensor: Tensor, name: str, dtype: DType | None = None) -> Tensor:
    """Allocate a tensor of `tensor`'s shape with the layout that an elementwise op gives its result."""
    shape, strides = tensor.shape, tensor.strides
    contiguous = contiguous_strides(shape)
    if strides != contiguous and not is_dense(shape, strides):
        strides = elementwise_strides(shape, (tensor,))
    return new_tensor(tensor.memory, shape, dtype or tensor.dtype, name, strides)


def of_two(left: Tensor, right: Tensor, name: str, dtype: DType | None = None) -> Tensor:
    """Allocate the result of an elementwise op over two tensors."""
    shape = broadcast(left.shape, right.shape)
    strides = elementwise_strides(shape, (left, right))
    return new_tensor(left.memory, shape, dtype or promote(left, right), name, strides)


def promote(left: Tensor, right: Tensor) -> DType:
    """Return the dtype of an op over two tensors: the wider float. A tensor with dims wins over a scalar tensor."""
    a, b = left.dtype, right.dtype
    if a is b or not b.is_floating_point or (not right.shape and a.is_floating_point):
        return a
    if not a.is_floating_point or not left.shape:
        return b
    return a if a.itemsize >= b.itemsize else b


def recording(*tensors: Tensor) -> bool:
    """Tell whether an op over these tensors gets a grad_fn."""
    if tensors[0].storage.memory.grad_enabled:
        for tensor in tensors:
            if tensor.node is not None:
                return True
    return False


def record(
    out: Tensor,
    backward: object,
    inputs: Sequence[Tensor],
    saved: Sequence[Tensor] = (),
    context: object = None,
) -> Tensor:
    """Give `out` a grad_fn that saves `saved`, if an input requires a gradient. Returns `out`."""
    if recording(*inputs):
        out.node = Node(out.memory, backward, inputs, saved, context)  # type: ignore[arg-type]
    return out


# --- add, mul, and their scalar forms


def add(a: Tensor, b: Tensor | float) -> Tensor:
    """Compute `a + b`. It saves nothing; both gradients are the incoming one."""
    if not isinstance(b, Tensor):
        return scale(a, "add")
    out = of_two(a, b, "add")
    return record(out, _add_backward, (a, b))


def _add_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    grad = grads[0]
    return [grad if node.needs(0) else None, grad if node.needs(1) else None]


def mul(a: Tensor, b: Tensor | float) -> Tensor:
    """Compute `a * b`. It saves each factor if the other one requires a gradient."""
    if not isinstance(b, Tensor):
        return scale(a, "mul")
    node = None
    if recording(a, b):
        # a factor is saved if the other one requires a gradient
        saved = [t for t, other in ((a, b), (b, a)) if other.node is not None]
        node = Node(a.memory, _mul_backward, (a, b), saved)
    out = of_two(a, b, "mul")
    out.node = node
    return out


def _mul_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    saved = node.unpack()
    grad_b = of_two(grads[0], saved[0], "mul gradient") if node.needs(1) else None
    grad_a = of_two(grads[0], saved[-1], "mul gradient") if node.needs(0) else None
    return [grad_a, grad_b]


def sub(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a - b`. It saves nothing; the second gradient is the incoming one negated."""
    out = of_two(a, b, "sub")
    return record(out, _sub_backward, (a, b))


def _sub_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    grad = grads[0]
    return [grad if node.needs(0) else None, like(grad, "sub gradient") if node.needs(1) else None]


def mul_(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a *= b`, where `b` requires no gradient. It saves b; the result has a's storage."""
    node = Node(a.memory, _mul_inplace_backward, (a,), (b,)) if recording(a) else None
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def _mul_inplace_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (b,) = node.unpack()
    return [of_two(grads[0], b, "mul gradient")]


def over(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a / b`, where `b` requires no gradient. It saves b."""
    node = Node(a.memory, _over_backward, (a,), (b,)) if recording(a) else None
    out = of_two(a, b, "quotient")
    out.node = node
    return out


def _over_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (b,) = node.unpack()
    return [of_two(grads[0], b, "quotient gradient")]


def mul_view_(a: Tensor, b: Tensor) -> Tensor:
    """Compute `view *= b` for a view of all of `a` that has b's shape: as `mul_`, through the view (CopySlices)."""
    node = Node(a.memory, _mul_view_backward, (a,), (b,)) if recording(a) else None
    return Tensor(a.storage, a.shape, a.strides, a.dtype, node)


def _mul_view_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (b,) = node.unpack()
    result = like(grads[0], "gradient of the base")
    of_the_view = like(b, "gradient of the view", grads[0].dtype)
    _product = of_two(of_the_view, b, "mul gradient")
    return [result]


def scale(a: Tensor, op: str, name: str = "") -> Tensor:
    """Compute `a op scalar` for add, sub, mul or div. It saves nothing."""
    return record(like(a, name or op), _add_scalar_backward if op in ("add", "sub") else _scale_backward, (a,))


def _add_scalar_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return grads[:1]


def _scale_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [like(grads[0], "scale gradient")]


def neg(a: Tensor) -> Tensor:
    """Compute `-a`. It saves nothing."""
    return record(like(a, "neg"), _scale_backward, (a,))


def one_minus(a: Tensor) -> Tensor:
    """Compute `1 - a`. It saves nothing; the gradient is the incoming one negated."""
    return record(like(a, "one minus"), _scale_backward, (a,))


def tanh(a: Tensor) -> Tensor:
    """Compute `tanh(a)`. It saves its result."""
    out = like(a, "tanh")
    return _record_result(out, _from_saved_backward, a)


def sigmoid(a: Tensor) -> Tensor:
    """Compute `sigmoid(a)`. It saves its result."""
    return _record_result(like(a, "sigmoid"), _from_saved_backward, a)


def erf(a: Tensor) -> Tensor:
    """Compute `erf(a)`. It saves a."""
    node = Node(a.memory, _erf_backward, (a,), (a,)) if recording(a) else None
    out = like(a, "erf")
    out.node = node
    return out


def _erf_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (a,) = node.unpack()
    # 2 / sqrt(pi) * exp(-(a.pow(2))) * grad: one C++ expression, whose temporaries live until its end.
    _temporaries = [like(a, "erf gradient") for _ in ("pow", "neg", "exp", "mul")]
    return [of_two(a, grads[0], "erf gradient")]


@autocast("rsqrt")
def rsqrt(a: Tensor) -> Tensor:
    """Compute `1/sqrt(a)`. It saves its result."""
    out = like(a, "rsqrt")
    return _record_result(out, _rsqrt_backward, a)


def _record_result(out: Tensor, backward: object, a: Tensor) -> Tensor:
    # A node that saves its own result must not refer to the tensor that refers to it.
    if recording(a):
        saved = Tensor(out.storage, out.shape, out.strides, out.dtype)
        out.node = Node(out.memory, backward, (a,), (saved,))  # type: ignore[arg-type]
    return out


def _from_saved_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (saved,) = node.unpack()
    return [of_two(grads[0], saved, "gradient")]


def _rsqrt_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (result,) = node.unpack()
    cubed = like(result, "rsqrt gradient")
    scaled = of_two(grads[0], result, "rsqrt gradient")  # -0.5 * grad
    return [of_two(scaled, cubed, "rsqrt gradient")]


def bounded_sqrt(a: Tensor) -> Tensor:
    """Compute `sqrt(a)` with SqrtBoundDerivative (models/recurrent_gemma/modeling_recurrent_gemma.py). It saves a."""
    node = Node(a.memory, _bounded_sqrt_backward, (a,), (a,)) if recording(a) else None
    out = like(a, "sqrt")
    out.node = node
    return out


def _bounded_sqrt_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (x,) = node.unpack()
    quadruple = like(x, "sqrt gradient")
    clipped_x_times_4 = like(quadruple, "sqrt gradient")
    del quadruple
    root = like(clipped_x_times_4, "sqrt gradient")
    return [of_two(grads[0], root, "sqrt gradient")]


def activation(a: Tensor, name: str) -> Tensor:
    """Compute silu, gelu, relu, mish … as one kernel. It saves its input (relu its result); backward is one kernel."""
    if name == "relu":
        return _record_result(like(a, name), _from_saved_backward, a)
    node = Node(a.memory, _from_saved_backward, (a,), (a,)) if recording(a) else None
    out = like(a, name)
    out.node = node
    return out


def add_(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a += b` in place. The graph treats it as `a + b`."""
    return _in_place(a, _add_backward, (a, b))


def scale_(a: Tensor) -> Tensor:
    """Compute `a *= scalar` or `a /= scalar` in place."""
    return _in_place(a, _scale_backward, (a,))


def _in_place(a: Tensor, backward: object, inputs: Sequence[Tensor]) -> Tensor:
    return record(Tensor(a.storage, a.shape, a.strides, a.dtype), backward, inputs)


@autocast("pow")
def power(a: Tensor, exponent: float) -> Tensor:
    """Compute `a ** exponent`. It saves a."""
    node = Node(a.memory, _power_backward, (a,), (a,)) if recording(a) else None
    out = like(a, "pow")
    out.node = node
    return out


def _power_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (a,) = node.unpack()
    # grad * (exponent * a.pow(exponent - 1)), pow_backward in FunctionsManual.cpp
    powered = like(a, "pow gradient")
    return [of_two(grads[0], _consume_scale(powered), "pow gradient")]


def _consume_scale(tensor: Tensor) -> Tensor:
    return like(tensor, "pow gradient")


def cast(a: Tensor, dtype: DType, name: str = "") -> Tensor:
    """Compute `a.to(dtype)`: the tensor itself if it has that dtype."""
    if a.dtype is dtype:
        return a
    return record(like(a, name or f"cast to {dtype}", dtype), _cast_backward, (a,), context=a.dtype)


def cast_row_major(a: Tensor, dtype: DType, name: str = "") -> Tensor:
    """Compute `a.to(dtype, memory_format=torch.contiguous_format)`: a copy is row-major."""
    if a.dtype is dtype:
        return a
    out = new_tensor(a.memory, a.shape, dtype, name or f"cast to {dtype}")
    return record(out, _cast_backward, (a,), context=a.dtype)


def _cast_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [like(grads[0], "cast gradient", node.context)]


def mean(a: Tensor) -> Tensor:
    """Compute `a.mean(-1, keepdim=True)`. It saves nothing but the size."""
    out = new_tensor(a.memory, (*a.shape[:-1], ONE_DIM), a.dtype, "mean")
    return record(out, _mean_backward, (a,), context=a.shape)


def _mean_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    # grad.expand(shape) / n
    expanded = Tensor(grads[0].storage, node.context, (*grads[0].strides[:-1], 0), grads[0].dtype)
    return [like(expanded, "mean gradient")]


@autocast("sum")
def sum_last(a: Tensor, dtype: DType | None = None) -> Tensor:
    """Compute `a.sum(-1, keepdim=True, dtype)`."""
    out = new_tensor(a.memory, (*a.shape[:-1], ONE_DIM), dtype or a.dtype, "sum")
    return record(out, _sum_backward, (a,), context=a.shape)


def _sum_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [Tensor(grads[0].storage, node.context, (*grads[0].strides[:-1], 0), grads[0].dtype)]


@autocast("softmax")
def softmax(a: Tensor, dtype: DType | None = None) -> Tensor:
    """Compute `softmax(a, -1, dtype)`. It saves its result. An upcast before it is a cast of its own in CPU and CUDA
    traces."""
    a = cast(a, dtype) if dtype is not None and a.dtype is not fp32 else a
    out = new_tensor(a.memory, a.shape, a.dtype, "softmax")
    return _record_result(out, _softmax_backward, a)


def _softmax_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (result,) = node.unpack()
    out = new_tensor(result.memory, result.shape, result.dtype, "softmax gradient")
    _product = like(result, "gradient times softmax")  # softmax_backward_cuda_out in native/cuda/SoftMax.cu
    return [out]


@replaceable
def dropout(a: Tensor, p: float) -> Tensor:
    """Compute training dropout as CUDA's native_dropout. It saves a bool mask. With p = 0 it returns `a` and costs
    nothing."""
    if p == 0.0:
        return a
    mask = like(a, "dropout mask", boolean)  # before the result (dropout_cuda in native/cuda/Dropout.cu)
    out = like(a, "dropout")
    return record(out, _from_saved_backward_mask, (a,), (mask,))


def _from_saved_backward_mask(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _mask = node.unpack()
    return [like(grads[0], "dropout gradient")]
