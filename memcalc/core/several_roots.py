"""Backward of several outputs at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import run_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memcalc.core.autograd import Node
    from memcalc.core.tensor import Tensor


def backward_of_several(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], queued: Callable[[], None] | None = None
) -> None:
    """Run `torch.autograd.backward(outputs, gradients)`. The caller's frame keeps the gradients alive."""
    memory = outputs[0].memory
    inbox: dict[Node, list[Tensor | None]] = {}
    for output, gradient in zip(outputs, gradients, strict=True):
        assert output.node is not None
        inbox.setdefault(output.node, [None] * output.node.outputs)[output.output] = gradient
    run_graph(memory, inbox, queued)
    memory.scope = ""
