"""Complex numbers as views of pairs, for rotations written with `torch.polar`.

Sources: tools/autograd/derivatives.yaml (view_as_real, view_as_complex, mul), FunctionsManual.cpp
(mul_tensor_backward).
"""

from __future__ import annotations

from typing import Final

from memcalc.core.autograd import Node, no_kernel
from memcalc.core.dims import Dim
from memcalc.core.dtypes import complex64, fp32
from memcalc.core.ops.elementwise import like, of_two, recording
from memcalc.core.ops.shape import contiguous
from memcalc.core.tensor import Tensor

PAIR: Final = Dim("2", 2)


def view_as_complex(a: Tensor) -> Tensor:
    """Return (…, n, 2) fp32 as (…, n) complex64: a view."""
    node = Node(a.memory, _view_as_complex_backward, (a,)) if recording(a) else None
    return _as_complex(a, node)


def view_as_real(a: Tensor) -> Tensor:
    """Return (…, n) complex64 as (…, n, 2) fp32: a view."""
    node = Node(a.memory, _view_as_real_backward, (a,)) if recording(a) else None
    return _as_real(a, node)


def _as_complex(a: Tensor, node: Node | None = None) -> Tensor:
    strides = tuple(stride // 2 for stride in a.strides[:-1])
    return Tensor(a.storage, a.shape[:-1], strides, complex64, node)


def _as_real(a: Tensor, node: Node | None = None) -> Tensor:
    strides = (*(2 * stride for stride in a.strides), 1)
    return Tensor(a.storage, (*a.shape, PAIR), strides, fp32, node)


@no_kernel
def _view_as_complex_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [_as_real(contiguous(grads[0]))]


@no_kernel
def _view_as_real_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [_as_complex(contiguous(grads[0]))]


def turn(a: Tensor, by: Tensor) -> Tensor:
    """Compute `a * by` of complex numbers, where `by` requires no gradient. Saves `by`; backward conjugates it into a
    copy."""
    node = Node(a.memory, _turn_backward, (a,), (by,)) if recording(a) else None
    out = of_two(a, by, "product of complex numbers")
    out.node = node
    return out


def _turn_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (by,) = node.unpack()
    conjugate = like(by, "conjugate")
    return [of_two(grads[0], conjugate, "gradient of complex numbers")]
