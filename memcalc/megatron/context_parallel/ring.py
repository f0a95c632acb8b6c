"""Context parallelism with keys and values sent around a ring (AttnFuncWithCPAndKVP2P), with a causal mask, on the last
rank of the ring.

The last rank's queries attend to some keys of every rank, so no rank has more alive in forward. In backward the other
ranks also have the statistics of the second half of their queries: half of the logsumexp. Corrections are fused kernels
there (torch.compile), without temporaries.
"""

from __future__ import annotations

from functools import lru_cache

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32
from memcalc.core.ops.attention import heads_inside
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.shape import transpose
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.kernels.liger import alias
from memcalc.megatron.context_parallel.layout import Laid, attends_in_parts, laid_out, send

_PAIR = Dim("2", 2)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ranks: int, incoming: Laid = alias) -> Tensor:
    """Compute attention: q (batch, heads, seq/cp, head_dim), k and v with their heads -> (batch, seq/cp, heads,
    head_dim).

    It saves q, the keys and values received last, the output and one fp32 logsumexp per query and head. `incoming` lays out
    the gradient that backward is given.
    """
    memory = q.memory
    pair = (*k.shape[:3], _joined(k.shape[3], v.shape[3]))
    out_shape = (*q.shape[:3], v.shape[3])
    received: list[Tensor] = []
    outputs: list[Tensor] = []
    sums: list[Tensor] = []
    attends_in_parts(q, v.shape, ranks + 1, 2)  # the rank's own keys, and half of every other rank's
    for step in range(ranks):
        if step == 0:
            received.append(new_tensor(memory, pair, k.dtype, "keys and values"))
        if step < ranks - 1:
            received.append(like(received[step], "keys and values of the next rank"))
            send(k, "send", "keys and values", pair)
        outputs.append(laid_out(q, out_shape, "attention output of a step"))
        sums.append(new_tensor(memory, q.shape[:3], fp32, "attention logsumexp of a step"))
    logsumexp = like(sums[0], "attention logsumexp")
    out = laid_out(q, out_shape, "attention output")
    if recording(q, k, v):
        out.node = Node(memory, _ring_backward, (q, k, v), (q, received[-1], alias(out), logsumexp), (ranks, incoming))
    return transpose(out, 1, 2)


@lru_cache(maxsize=64)
def _joined(k: Dim, v: Dim) -> Dim:
    return Dim(f"2·{k.name}" if k is v else f"({k.name}+{v.name})", k.size + v.size)


def _ring_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    q, kv, _out, _logsumexp = node.unpack()
    ranks: int = node.context[0]
    incoming: Laid = node.context[1]
    _gradient = incoming(grads[0])
    memory, shapes = node.memory, [shape for shape, _ in node.metadata[1:]]
    query_gradient = laid_out(q, q.shape, "query gradient")
    buffers = [new_tensor(memory, (_PAIR, *kv.shape), kv.dtype, "keys, values and their gradients") for _ in range(2)]
    attends_in_parts(q, shapes[1], ranks + 1, 2, backward=True)
    for step in range(ranks):
        ends = step in (0, ranks - 1)
        name = "keys, values and their gradients"
        if ends:
            name = "gradients of keys and values" if step else "keys and values, again"
        send(kv, "send", name, kv.shape if ends else (_PAIR, *kv.shape))
        whole = step == ranks - 1  # before the last step, gradients are of the first half of the keys and values
        _of_step = [
            laid_out(q, q.shape, "query gradient of a step"),
            *(new_tensor(memory, shape, kv.dtype, "gradient of a step") for shape in (shapes if whole else shapes[:1])),
        ]
        del _of_step
    received = buffers[ranks % 2]
    buffers.clear()
    gradients = [Tensor(received.storage, shape, heads_inside(shape), kv.dtype) for shape in shapes]
    return [query_gradient, *gradients]
