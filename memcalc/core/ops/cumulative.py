"""Cumulative sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.elementwise import cast, recording
from memcalc.core.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType


@autocast("cumsum")
def cumsum(a: Tensor, i: int, dtype: DType | None = None) -> Tensor:
    """Compute `a.cumsum(i, dtype)`. It saves nothing. Backward flips the gradient, sums it up and flips it back."""
    node = Node(a.memory, _cumsum_backward, (a,), (), a.shape[i].size) if recording(a) else None
    out = new_tensor(a.memory, a.shape, dtype or a.dtype, "cumulative sum")
    out.node = node
    return out


def _cumsum_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    grad = cast(grads[0], node.metadata[0][1])
    if node.context == 1:
        return [grad]
    # grad.flip(dim).cumsum(dim).flip(dim): one C++ expression, whose temporaries live until its end.
    _temporaries = [new_tensor(grad.memory, grad.shape, grad.dtype, "cumulative gradient") for _ in ("flip", "cumsum")]
    return [new_tensor(grad.memory, grad.shape, grad.dtype, "cumulative gradient")]
