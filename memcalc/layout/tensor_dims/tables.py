"""Look-ups in a table whose rows are shared by ranks: the ids of other ranks' rows are masked, in forward and in the
gradient (VocabParallelEmbedding1D, 2D, 2p5D and 3D in colossalai/legacy/nn/layer)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dtypes import boolean
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.embedding import embedding
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.layout.tensor_dims.sending import along_first, send

if TYPE_CHECKING:
    from memcalc.core.dims import Dim


class Looked(tuple[Tensor, Tensor, Tensor]):
    """The embeddings of a rank's rows, and the mask and the ids that the caller's frame holds beside them."""

    __slots__ = ()


def of_own_rows(table: Tensor, ids: Tensor) -> Looked:
    """Look up ids in a rank's rows of a table. What other ranks have is zero."""
    below, above = like(ids, "ids below the rows", boolean), like(ids, "ids above the rows", boolean)
    input_mask = like(ids, "ids outside the rows", boolean)
    del below, above
    copied = like(ids, "ids, copied")
    masked_input = like(ids, "ids within the rows")
    del copied
    out = embedding(table, masked_input)
    if recording(out):
        node = Node(out.memory, _zeroed_backward, (out,), (input_mask,))
        out = Tensor(out.storage, out.shape, out.strides, out.dtype, node)
    return Looked((out, input_mask, masked_input))


def _zeroed_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    """Copy the gradient, with zeros at the masked rows (index_put in derivatives.yaml)."""
    _mask = node.unpack()
    return [like(grads[0], "gradient within the rows")]


def scattered(x: Tensor, own: Dim, group: str, name: str) -> Tensor:
    """Reduce-scatter along the first dim. Backward gathers."""
    send(x.memory, group, "reduce_scatter", name, x.shape, x.dtype)
    out = new_tensor(x.memory, (own, *x.shape[1:]), x.dtype, f"own part of {name}")
    if recording(x):
        out.node = Node(x.memory, _scattered_backward, (x,), (), (group, name))
    return out


def _scattered_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    group, name = node.context
    shape, dtype = node.metadata[0]
    send(node.memory, group, "all_gather", f"gradient of {name}", shape, dtype)
    return [new_tensor(node.memory, shape, dtype, f"gradient of {name}, gathered")]


def gathered(x: Tensor, ranks: int, group: str, name: str) -> Tensor:
    """All-gather along the first dim. Backward reduce-scatters."""
    shape = along_first(x, ranks)
    send(x.memory, group, "all_gather", name, shape, x.dtype)
    out = new_tensor(x.memory, shape, x.dtype, f"{name}, gathered")
    if recording(x):
        out.node = Node(x.memory, _gathered_backward, (x,), (), (group, name))
    return out


def _gathered_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    group, name = node.context
    shape, dtype = node.metadata[0]
    send(node.memory, group, "reduce_scatter", f"gradient of {name}", grads[0].shape, dtype)
    return [new_tensor(node.memory, shape, dtype, f"own part of the gradient of {name}")]
