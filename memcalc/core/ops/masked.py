"""Rows that a mask chooses, and their way back.

`rows` says how many places of the mask are true. Sources of what each op saves and what its backward allocates:
tools/autograd/derivatives.yaml and FunctionsManual.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dtypes import boolean, int64
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.core.dims import Dim


def chosen_rows(a: Tensor, mask: Tensor, rows: Dim, name: str) -> Tensor:
    """Compute `a[mask]`, where the mask has the first dims of a. It saves the mask."""
    node = Node(a.memory, _chosen_rows_backward, (a,), (mask,), name) if recording(a) else None
    out = new_tensor(a.memory, (rows, *a.shape[len(mask.shape) :]), a.dtype, name)
    out.node = node
    return out


def _chosen_rows_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _mask = node.unpack()
    return [new_tensor(node.memory, node.metadata[0][0], grads[0].dtype, f"{node.context} gradient")]


def spread(source: Tensor, mask: Tensor, name: str) -> Tensor:
    """Compute `source.new_zeros(mask.shape).masked_scatter(mask, source)`. It saves the mask."""
    node = Node(source.memory, _spread_backward, (source,), (mask,), source.shape) if recording(source) else None
    zeros = like(mask, name, source.dtype)
    out = like(zeros, name)
    out.node = node
    return out


def _spread_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _mask = node.unpack()
    return [new_tensor(node.memory, node.context, grads[0].dtype, "gradient of the chosen rows")]


def masked_labels(ids: Tensor, mask: Tensor) -> Tensor:
    """Compute `ids.masked_fill(mask == 0, -100)` of integers."""
    left_out = like(mask, "positions without a label", boolean)
    labels = new_tensor(ids.memory, ids.shape, int64, "labels")
    del left_out
    return labels
