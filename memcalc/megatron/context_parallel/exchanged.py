"""Context parallelism by exchanging heads for tokens: each rank runs attention over the whole sequence for its part of
the heads (AttnFuncWithCPAndQKVOA2A; Ulysses, arXiv 2309.14509).

A tensor is copied so that the part for each rank is contiguous, sent, and put in order by another copy. In a list, the
next tensor is copied while the previous one is being sent.
"""

from __future__ import annotations

from functools import lru_cache

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, Shape
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.shape import transpose
from memcalc.core.ops.work import attends, attends_backward
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.kernels.liger import alias
from memcalc.megatron.context_parallel.layout import Laid, laid_out, send, whole_sequence


def exchanged_attention(q: Tensor, k: Tensor, v: Tensor, ranks: int, incoming: Laid = alias) -> Tensor:
    """Compute attention. It saves q, k, v and the output of the rank's heads, the output of its tokens, and one fp32
    logsumexp per query and head. `incoming` lays out the gradient that backward is given."""
    own = [heads_of_a_rank(x.shape, ranks) for x in (q, k, v)]
    q_part, k_part, v_part = to_heads([q, k, v], own, ["queries", "keys", "values"])
    attends(q.memory, own[0], own[1], own[2], q.dtype)
    out_part = laid_out(q, own[0], "attention output of a rank's heads")
    logsumexp = new_tensor(q.memory, own[0][:3], fp32, "attention logsumexp")
    (out,) = to_tokens([out_part], [q.shape], ["attention output"])
    if recording(q, k, v):
        saved = (q_part, k_part, v_part, out_part, logsumexp)
        out.node = Node(q.memory, _exchanged_backward, (q, k, v), saved, incoming)
    return transpose(out, 1, 2)


@lru_cache(maxsize=1024)
def heads_of_a_rank(shape: Shape, ranks: int) -> Shape:
    """Return the shape of a tensor after `ranks` ranks have exchanged heads for tokens."""
    batch, heads, seq, width = shape
    return batch, Dim(f"{heads.name}/cp", heads.size // ranks), whole_sequence(seq, ranks), width


def _received(sent: Tensor, name: str, group: str) -> Tensor:
    send(sent, "all_to_all", name, sent.shape, group)
    return laid_out(sent, sent.shape, f"{name}, received")


def to_heads(tensors: list[Tensor], shapes: list[Shape], names: list[str], group: str = "cp") -> list[Tensor]:
    """Exchange tensors before attention (flash_attn_a2a_communicate)."""
    copies: list[Tensor] = []
    out: list[Tensor] = []
    for i in range(len(tensors) + 2):
        if 0 < i <= len(tensors):
            out.append(_received(copies[i - 1], names[i - 1], group))
        if i > 1:
            out[i - 2] = laid_out(out[i - 2], shapes[i - 2], f"{names[i - 2]} of a rank's heads")
        if i < len(tensors):
            copies.append(laid_out(tensors[i], tensors[i].shape, f"{names[i]} by rank"))
    return out


def to_tokens(tensors: list[Tensor], shapes: list[Shape], names: list[str], group: str = "cp") -> list[Tensor]:
    """Exchange tensors after attention (flash_attn_a2a_communicate)."""
    copies: list[Tensor] = []
    out: list[Tensor] = []
    for i in range(len(tensors) + 2):
        if 0 < i <= len(tensors):
            out.append(_received(copies[i - 1], names[i - 1], group))
        if i < len(tensors):
            copies.append(laid_out(tensors[i], tensors[i].shape, f"{names[i]} by rank"))
        if i > 1:
            out[i - 2] = laid_out(out[i - 2], shapes[i - 2], names[i - 2])
    return out


def _exchanged_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    q, k, v, out, _logsumexp = node.unpack()
    tokens = [shape for shape, _ in node.metadata]
    gradient = node.context(grads[0])
    (_grad,) = to_heads([gradient], [out.shape], ["output gradient"])
    attends_backward(q.memory, q.shape, k.shape, v.shape, q.dtype)
    gradients = [laid_out(x, x.shape, "gradient of a rank's heads") for x in (q, k, v)]
    return to_tokens(gradients, tokens, ["query gradient", "key gradient", "value gradient"])
