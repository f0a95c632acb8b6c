"""exp and its relatives. Sources: tools/autograd/derivatives.yaml (exp, softplus, log, log_sigmoid)."""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.elementwise import like, of_two, recording
from memcalc.core.tensor import Tensor


@autocast("exp")
def exp(a: Tensor) -> Tensor:
    """Compute `exp(a)`. It saves its result."""
    out = like(a, "exp")
    if recording(a):
        saved = Tensor(out.storage, out.shape, out.strides, out.dtype)
        out.node = Node(out.memory, _from_saved_backward, (a,), (saved,))
    return out


@autocast("expm1")
def expm1(a: Tensor) -> Tensor:
    """Compute `exp(a) - 1`. It saves its result."""
    out = like(a, "expm1")
    if recording(a):
        saved = Tensor(out.storage, out.shape, out.strides, out.dtype)
        out.node = Node(out.memory, _expm1_backward, (a,), (saved,))
    return out


def _expm1_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (result,) = node.unpack()
    one_more = like(result, "expm1 gradient")
    return [of_two(grads[0], one_more, "expm1 gradient")]


@autocast("softplus")
def softplus(a: Tensor) -> Tensor:
    """Compute `log(1 + exp(a))` as one kernel. It saves a."""
    node = Node(a.memory, _from_saved_backward, (a,), (a,)) if recording(a) else None
    out = like(a, "softplus")
    out.node = node
    return out


def _from_saved_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (saved,) = node.unpack()
    return [of_two(grads[0], saved, "gradient")]
