"""scatter_to_sequence_parallel_region: each rank keeps its shard of a tensor that all ranks have."""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.dims import Shape
from memcalc.core.ops.elementwise import recording
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.megatron.layers import TensorParallel


def scattered(tp: TensorParallel, x: Tensor, name: str) -> Tensor:
    """Run scatter_to_sequence_parallel_region and clone the shard, so that the whole tensor can be freed."""
    shape: Shape = (x.shape[0], tp.shard, x.shape[2])
    out = new_tensor(x.memory, shape, x.dtype, "shard of the embeddings")
    if recording(x):
        out.node = Node(x.memory, _scattered_backward, (x,), (), (tp, name))
    return out


def _scattered_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    tp, name = node.context
    shape, dtype = node.metadata[0]
    tp.send(node.memory, "all_gather", f"output gradient of {name}", shape, dtype)
    return [new_tensor(node.memory, shape, dtype, "gathered gradient")]
