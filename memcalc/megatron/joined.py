"""Queries, keys and values that are parts of one projection's output, as attention takes them."""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.ops.attention import heads_inside
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.shape import clone
from memcalc.core.tensor import Strides, Tensor, new_tensor
from memcalc.families.base import blocks
from memcalc.kernels import megatron as kernels


def apart(query: Tensor, key: Tensor, value: Tensor, *, joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what Transformer Engine's attention takes: parts of one tensor if all three are, with equal heads, and
    otherwise three packed tensors (get_qkv_layout in
    transformer_engine/pytorch/attention/dot_product_attention/utils.py)."""
    if query.shape[1].size == key.shape[1].size and all(x.storage is joined.storage for x in (query, key, value)):
        return query, key, value
    names = (query, "query"), (key, "key"), (value, "value")
    query, key, value = (
        copied(x, name, heads_inside(x.shape)) if x.storage is joined.storage else x for x, name in names
    )
    return query, key, value


def copied(x: Tensor, name: str, strides: Strides | None = None) -> Tensor:
    """Return a copy with these strides; packed without them."""
    out = new_tensor(x.memory, x.shape, x.dtype, name, strides)
    if recording(x):
        out.node = Node(x.memory, _copied_backward, (x,))
    return out


def _copied_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [grads[0]]


def local_attention(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    """Run DotProductAttention (megatron/core/transformer/dot_product_attention.py). It copies keys and values of
    several heads for each head, and queries whose heads do not join with the batch."""
    if q.shape[1].size != k.shape[1].size:
        if k.shape[1].size == 1:
            k, v = (clone(blocks.repeat_kv(x, q.shape[1])) for x in (k, v))
        if q.strides != heads_inside(q.shape) and q.shape[0].size > 1:
            q = copied(q, "query", heads_inside(q.shape))
    return kernels.dot_product_attention(q, k, v, p)
