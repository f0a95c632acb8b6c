"""Dropout as a module. An engine with hooks around modules sees it, though it has no parameters."""

from __future__ import annotations

from memcalc.core.autograd import Node, no_kernel
from memcalc.core.ops.elementwise import dropout, recording
from memcalc.core.tensor import Tensor


def dropout_module(x: Tensor, p: float) -> Tensor:
    """Run nn.Dropout, or with p = 0 nn.Identity. The hooks around it have a node each, also if it returns its input."""
    visitor = x.memory.visitor
    if visitor is None:
        return dropout(x, p)
    visited = visitor.enter("dropout", None)
    out = passed(dropout(x, p), x)
    if visited:
        visitor.leave(done=True)
    return out


def passed(out: Tensor, x: Tensor) -> Tensor:
    """Return a module's output; with a node of its own if it is the module's input and wants a gradient."""
    if out is not x or not recording(x):
        return out
    return Tensor(x.storage, x.shape, x.strides, x.dtype, Node(x.memory, _pass, (x,)))


@no_kernel
def _pass(_: Node, grads: list[Tensor]) -> list[Tensor]:
    return grads
