"""Table look-ups."""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.ops.elementwise import recording
from memcalc.core.tensor import Tensor, new_tensor


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    """Look up ids (...) in a table (vocab, hidden) -> (..., hidden). It saves the ids; the gradient is a dense
    table."""
    name = table.name.removesuffix(".weight")
    node = Node(table.memory, _embedding_backward, (table,), (ids,), name) if recording(table) else None
    out = new_tensor(table.memory, (*ids.shape, table.shape[1]), table.dtype, name)
    out.node = node
    return out


def _embedding_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _ids = node.unpack()
    return [new_tensor(node.memory, node.metadata[0][0], grads[0].dtype, f"{node.context} weight gradient")]
