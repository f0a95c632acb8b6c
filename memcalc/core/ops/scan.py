"""Recurrences along a sequence, which real code runs step by step in a Python loop.

A loop is written with the ops of its last two steps. All earlier steps are one node, which keeps their tensors in
blocks with a dim for the steps, so sizes stay polynomials in seq. Memory is fullest in the last two steps. In forward
that is the last step. In backward it is the step before it: that step is the first to add its gradients to existing
ones, and nothing of the earlier steps has been freed by then. The temporaries of the earlier steps are those of the
last two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.autograd import Node
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.work import works
from memcalc.core.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.dims import Dim, Shape
    from memcalc.core.dtypes import DType


class Block(NamedTuple):
    """A tensor that every step keeps, as one block for all steps."""

    shape: Shape
    dtype: DType
    name: str


class Product(NamedTuple):
    """A matrix product that every step makes, for all steps together. Both factors want gradients."""

    factors: Shape
    dtype: DType
    name: str


def earlier_steps(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], kept: Sequence[Tensor | Block], product: Product | None = None
) -> None:
    """Record the steps before the last two. They produce `outputs` and keep `kept` for backward.

    Their additions to the gradients of `inputs` take no more memory than those of the later steps did.
    """
    memory = inputs[0].memory
    if product is not None:
        works(memory, product.name, product.factors, product.dtype)
    if recording(*inputs):
        # Before its recomputation, a checkpoint frees each step's tensors when the next step comes.
        keeps = memory.checkpoint is None or memory.checkpoint.keeps
        saved = [
            Tensor(t.storage, t.shape, t.strides, t.dtype)
            if isinstance(t, Tensor)
            else new_tensor(memory, t.shape, t.dtype, t.name)
            if keeps
            else inputs[0]
            for t in kept
        ]
        node = Node(memory, _no_more_than_there_is, inputs, saved, product, outputs=len(outputs))
        for i, output in enumerate(outputs):
            output.node, output.output = node, i


def _no_more_than_there_is(node: Node, grads: list[Tensor]) -> list[None]:
    product: Product | None = node.context
    if product is not None:
        works(node.memory, product.name, product.factors, product.dtype, products=2)
    return [None] * len(node.edges)


def stack_steps(tensors: Sequence[Tensor], i: int, dim: Dim) -> Tensor:
    """Compute `torch.stack` of one tensor per step, with `dim` in place `i`. Backward is `unbind`, views."""
    last = tensors[-1]
    out = new_tensor(last.memory, (*last.shape[:i], dim, *last.shape[i:]), last.dtype, "stacked steps")
    if recording(*tensors):
        out.node = Node(out.memory, _stack_backward, tensors, (), i)
    return out


def _stack_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    i, grad = node.context, grads[0]
    # The gradient of the earlier steps is part of the same storage too; nothing reads its strides.
    strides = (*grad.strides[:i], *grad.strides[i + 1 :])
    return [
        Tensor(grad.storage, shape, strides, grad.dtype) if node.needs(k) else None
        for k, (shape, _) in enumerate(node.metadata)
    ]
