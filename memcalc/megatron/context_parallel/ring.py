"""Context parallelism with keys and values sent around a ring (AttnFuncWithCPAndKVP2P), with a causal mask, on the last
rank of the ring.

The last rank's queries attend to some keys of every rank, so no rank has more alive in forward. In backward the other
ranks also have the statistics of the second half of their queries: half of the logsumexp. Corrections are fused kernels
there (torch.compile), without temporaries.

With `a2a+p2p` (hierarchical context parallelism) neighbours first exchange heads for tokens, so that only every so many
ranks are in a ring.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, Shape
from memcalc.core.dtypes import fp32
from memcalc.core.ops.attention import heads_inside
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.shape import transpose
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.kernels.liger import alias
from memcalc.megatron.context_parallel.exchanged import heads_of_a_rank, to_heads, to_tokens
from memcalc.megatron.context_parallel.layout import Laid, attends_in_parts, laid_out, send

_PAIR = Dim("2", 2)
EXCHANGES: Final = "cp·a2a"
"""The group of the ranks that exchange heads, if a ring has others."""


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ranks: int, incoming: Laid = alias) -> Tensor:
    """Compute attention: q (batch, heads, seq/cp, head_dim), k and v with their heads -> (batch, seq/cp, heads,
    head_dim).

    It saves q, the keys and values received last, the output and one fp32 logsumexp per query and head. `incoming` lays out
    the gradient that backward is given.
    """
    ring = _around(q, k, v, ranks)
    out = ring.out
    if recording(q, k, v):
        saved = (q, ring.received[-1], alias(out), ring.logsumexp)
        out.node = Node(q.memory, _ring_backward, (q, k, v), saved, (ranks, incoming))
    return transpose(out, 1, 2)


def exchanged_ring_attention(
    q: Tensor, k: Tensor, v: Tensor, ranks: int, exchanging: int, incoming: Laid = alias
) -> Tensor:
    """Compute attention as `ring_attention` does, after groups of `exchanging` ranks have exchanged heads for tokens.

    It saves q and the keys and values of the rank's heads, the output of its tokens, and the logsumexp of its heads.
    """
    shapes = [heads_of_a_rank(x.shape, exchanging) for x in (q, k, v)]
    q_part, k_part, v_part = to_heads([q, k, v], shapes, ["queries", "keys", "values"], EXCHANGES)
    ring = _around(q_part, k_part, v_part, ranks // exchanging)
    (out,) = to_tokens([ring.out], [(*q.shape[:3], v.shape[3])], ["attention output"], EXCHANGES)
    if recording(q, k, v):
        saved = (q_part, ring.received[-1], alias(out), ring.logsumexp)
        context = ranks, exchanging, shapes, incoming
        out.node = Node(q.memory, _exchanged_ring_backward, (q, k, v), saved, context)
    return transpose(out, 1, 2)


class _Ring(NamedTuple):
    """The tensors of the forward's frame after the last step: all that was received, and the output of every step."""

    received: list[Tensor]
    of_steps: list[Tensor]
    out: Tensor
    logsumexp: Tensor


def _around(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> _Ring:
    """Send keys and values around the ring."""
    memory = q.memory
    pair = (*k.shape[:3], _joined(k.shape[3], v.shape[3]))
    out_shape = (*q.shape[:3], v.shape[3])
    received: list[Tensor] = []
    of_steps: list[Tensor] = []
    attends_in_parts(q, v.shape, ranks + 1, 2)  # the rank's own keys, and half of every other rank's
    for step in range(ranks):
        if step == 0:
            received.append(new_tensor(memory, pair, k.dtype, "keys and values"))
        if step < ranks - 1:
            received.append(like(received[step], "keys and values of the next rank"))
            send(k, "send", "keys and values", pair)
        of_steps.append(laid_out(q, out_shape, "attention output of a step"))
        of_steps.append(new_tensor(memory, q.shape[:3], fp32, "attention logsumexp of a step"))
    logsumexp = like(of_steps[1], "attention logsumexp")
    return _Ring(received, of_steps, laid_out(q, out_shape, "attention output"), logsumexp)


@lru_cache(maxsize=64)
def _joined(k: Dim, v: Dim) -> Dim:
    return Dim(f"2·{k.name}" if k is v else f"({k.name}+{v.name})", k.size + v.size)


def _ring_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    q, kv, _out, _logsumexp = node.unpack()
    ranks: int = node.context[0]
    incoming: Laid = node.context[1]
    _gradient = incoming(grads[0])
    shapes = [shape for shape, _ in node.metadata[1:]]
    query_gradient, buffers = _buffers(q, kv)
    gradients = _back_around(q, kv, shapes, ranks, buffers)
    del buffers
    return [query_gradient, *gradients.of_own]


def _exchanged_ring_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    q, kv, out, _logsumexp = node.unpack()
    ranks: int = node.context[0]
    exchanging: int = node.context[1]
    shapes: list[Shape] = node.context[2]
    incoming: Laid = node.context[3]
    query_gradient, buffers = _buffers(q, kv)
    whole = (*q.shape[:3], shapes[2][3])
    names = ["attention output", "output gradient"]
    _out, _gradient = to_heads([out, incoming(grads[0])], [whole, whole], names, EXCHANGES)
    gradients = _back_around(q, kv, shapes[1:], ranks // exchanging, buffers)
    own, tokens = [query_gradient, *gradients.of_own], [shape for shape, _ in node.metadata]
    return to_tokens(own, tokens, ["query gradient", "key gradient", "value gradient"], EXCHANGES)


def _buffers(q: Tensor, kv: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient of the queries, and the two buffers that keys, values and their gradients are received in."""
    shape = (_PAIR, *kv.shape)
    query_gradient = laid_out(q, q.shape, "query gradient")
    return query_gradient, [new_tensor(q.memory, shape, kv.dtype, "keys, values and their gradients") for _ in range(2)]


class _Gradients(NamedTuple):
    """Gradients of the rank's own keys and values, and those of the last step, which the frame has beside them."""

    of_own: list[Tensor]
    of_step: list[Tensor]


def _back_around(q: Tensor, kv: Tensor, shapes: list[Shape], ranks: int, buffers: list[Tensor]) -> _Gradients:
    """Send keys, values and their gradients around the ring."""
    memory = q.memory
    attends_in_parts(q, shapes[1], ranks + 1, 2, backward=True)
    of_step: list[Tensor] = []
    for step in range(ranks):
        ends = step in (0, ranks - 1)
        name = "keys, values and their gradients"
        if ends:
            name = "gradients of keys and values" if step else "keys and values, again"
        send(kv, "send", name, kv.shape if ends else (_PAIR, *kv.shape))
        whole = step == ranks - 1  # before the last step, gradients are of the first half of the keys and values
        of_step.clear()
        of_step += [
            laid_out(q, q.shape, "query gradient of a step"),
            *(new_tensor(memory, shape, kv.dtype, "gradient of a step") for shape in (shapes if whole else shapes[:1])),
        ]
    received = buffers[ranks % 2]
    own = [Tensor(received.storage, shape, heads_inside(shape), kv.dtype) for shape in shapes]
    return _Gradients(own, of_step)
