"""Group norm as one kernel.

It saves its input, its weight, and mean and rstd of each group (tools/autograd/derivatives.yaml, native_group_norm), in
the weight's dtype if it is wider than the input's (aten/src/ATen/native/group_norm.cpp).
"""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.elementwise import recording
from memcalc.core.tensor import Tensor, new_tensor


@autocast("group_norm")
def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int) -> Tensor:
    """Compute native_group_norm over (batch, channels, ...)."""
    out = new_tensor(x.memory, x.shape, x.dtype, "group norm")
    wide = x.dtype if weight is None else weight.dtype
    each = (x.shape[0], Dim("groups", groups))
    statistics = [new_tensor(x.memory, each, wide, f"group norm {s}") for s in ("mean", "rstd")]
    inputs = [t for t in (x, weight, bias) if t is not None]
    if recording(*inputs):
        kept = [x, *([] if weight is None else [weight]), *statistics]
        out.node = Node(x.memory, _group_norm_backward, inputs, kept)
    return out


def _group_norm_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    _saved = node.unpack()
    return [
        new_tensor(node.memory, shape, dtype, "group norm gradient") if node.needs(i) else None
        for i, (shape, dtype) in enumerate(node.metadata)
    ]
