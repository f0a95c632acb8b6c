"""The mean squared error as torch computes it: one kernel that saves its input and the targets
(tools/autograd/derivatives.yaml, mse_loss)."""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.tensor import Tensor, new_tensor


@autocast("mse_loss")
def mse_loss(x: Tensor, targets: Tensor) -> Tensor:
    """Compute `F.mse_loss(x, targets)`: equal shapes -> a scalar.

    The kernel writes the squares and then their mean into a tensor of its own (mse_loss in native/Loss.cpp).
    """
    node = Node(x.memory, _mse_loss_backward, (x,), (x, targets)) if recording(x) else None
    out = new_tensor(x.memory, (), x.dtype, "loss")
    _squares = like(x, "squares")
    out.node = node
    return out


def _mse_loss_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    x, _targets = node.unpack()
    return [like(x, "gradient of the output")]
