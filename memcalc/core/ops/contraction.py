"""torch.einsum of two tensors: a batched product of permuted views (aten/src/ATen/native/Linear.cpp, sumproduct_pair)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import merge
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.axes import permute
from memcalc.core.ops.matmul import bmm
from memcalc.core.ops.shape import reshape, view

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor


def einsum(equation: str, left: Tensor, right: Tensor) -> Tensor:
    """Compute `torch.einsum(equation, left, right)`. Every label of the result is in an operand.

    The product sums over the labels that both operands have and the result does not. Its first operand is the one whose
    own label comes first in the result.
    """
    return _einsum((left, right), equation)


@autocast("einsum")
def _einsum(tensors: tuple[Tensor, Tensor], equation: str) -> Tensor:
    left, right = tensors
    operands, out = equation.split("->")
    left_labels, right_labels = operands.split(",")
    if _first_own(out, left_labels, right_labels) > _first_own(out, right_labels, left_labels):
        left, right, left_labels, right_labels = right, left, right_labels, left_labels
    dims = dict(zip(left_labels + right_labels, left.shape + right.shape, strict=True))
    # A dim of size 1 belongs to neither operand: it goes where the second operand's own dims go.
    both = [label for label in out if label in left_labels and label in right_labels and dims[label].size != 1]
    own_left = [label for label in out if label not in right_labels and dims[label].size != 1]
    own_right = [label for label in out if label not in both and label not in own_left]
    summed = [label for label in left_labels if label not in out]

    def flat(a: Tensor, labels: str, *groups: list[str]) -> Tensor:
        ones = [i for i, label in enumerate(labels) if all(label not in group for group in groups)]
        order = [labels.index(label) for group in groups for label in group if label in labels]
        return reshape(permute(a, *order, *ones), *(merge(*(dims[label] for label in group)) for group in groups))

    product = bmm(
        flat(left, left_labels, both, own_left, summed), flat(right, right_labels, both, summed, own_right), equation
    )
    made = [*both, *own_left, *own_right]
    return permute(view(product, *(dims[label] for label in made)), *(made.index(label) for label in out))


def _first_own(out: str, labels: str, others: str) -> int:
    return min((i for i, label in enumerate(out) if label in labels and label not in others), default=-1)
