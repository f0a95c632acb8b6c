"""Layer norm as one kernel: saves its input, the weight, and mean and rstd per token."""

from __future__ import annotations

from memcalc.autograd import Node
from memcalc.dims import ONE_DIM
from memcalc.ops.autocast import autocast
from memcalc.ops.elementwise import recording
from memcalc.ops.replaceable import replaceable
from memcalc.tensor import Tensor, new_tensor


@replaceable
@autocast("layer_norm")
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """native_layer_norm over the last dim."""
    out = new_tensor(x.memory, x.shape, x.dtype, "layer norm")
    statistics = [new_tensor(x.memory, (*x.shape[:-1], ONE_DIM), x.dtype, f"layer norm {s}") for s in ("mean", "rstd")]
    inputs = [t for t in (x, weight, bias) if t is not None]
    if recording(*inputs):
        out.node = Node(x.memory, _layer_norm_backward, inputs, [*inputs, *statistics])
    return out


def _layer_norm_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    saved = node.unpack()
    return [new_tensor(t.memory, t.shape, t.dtype, "layer norm gradient") for t in saved[: len(node.edges)]]
