"""Causal attention over a sequence that several ranks share, as torch's `context_parallel` runs it
(torch/distributed/tensor/experimental/_context_parallel/_attention.py of 2.13).

A rank holds the tokens of two chunks, an early and a late one (_HeadTailLoadBalancer). It attends to its own keys and
values, then to those of the other ranks. Of a rank before it, it needs the early half of the keys and values. For a
rank after it, it needs the late half of its own queries. The partial results are merged in fp32. Keys and values of all
ranks are gathered once (`allgather`, torch's default), or sent around the ring (`alltoall`: an all_to_all_single that
sends everything to one rank, so it counts as a send). Gradients of keys and values are always sent around the ring, in
fp32, one step more than there are other ranks.

The kernel is flash attention for 16 bits. For fp32, and if values are not as wide as keys, CUDA takes the
memory-efficient kernel. Its logsumexp has as many queries as its input only if that number is a multiple of 32.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, whole_of
from memcalc.core.dtypes import DType, fp32, int64
from memcalc.core.ops.attention import heads_inside
from memcalc.core.ops.attention_scratch import efficient_scratch, flash_scratch
from memcalc.core.ops.axes import chunk_dim, squeeze
from memcalc.core.ops.elementwise import cast, like, mul, recording, sigmoid, sub
from memcalc.core.ops.shape import cat, contiguous, unsqueeze
from memcalc.core.ops.work import attends, attends_backward
from memcalc.core.selective import ATTENTION, Results, selected
from memcalc.core.tensor import Sent, Tensor, contiguous_strides, new_tensor

if TYPE_CHECKING:
    from typing import Protocol

    from memcalc.core.dims import Shape
    from memcalc.layout.collectives import Kind

    class Rotater(Protocol):
        """An exchange that brings the tensors of other ranks to this rank."""

        def exchange(self, current: Tensor) -> None: ...

        def next(self) -> Tensor: ...


_SEQ: Final = 2
"""The dim of tokens in (batch, heads, seq, head_dim)."""


class Ring(NamedTuple):
    """The context-parallel group of a run, as one of its ranks sees it."""

    ranks: int
    rank: int
    gathers: bool
    """True if keys and values are gathered once; False if they are sent around the ring."""

    def rotater(self) -> Rotater:
        """Return the object that exchanges keys and values between the ranks."""
        return AllGather(self) if self.gathers else AllToAll("keys and values")


class AllToAll:
    """Sends a rank's tensor to the next rank (_AllToAllRotater)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.buffer: Tensor | None = None

    def exchange(self, current: Tensor) -> None:
        _send(current, "send", self.name, current.shape)
        self.buffer = like(current, f"{self.name} of the next rank")

    def next(self) -> Tensor:
        assert self.buffer is not None
        return self.buffer


class AllGather:
    """Gathers the tensors of all ranks in the first exchange; later exchanges do nothing (_AllGatherRotater)."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.buffer: Tensor | None = None

    def exchange(self, current: Tensor) -> None:
        if self.buffer is None:
            shape = _of_all(current.shape, self.ring.ranks)
            _send(current, "all_gather", "keys and values", shape)
            self.buffer = new_tensor(current.memory, shape, current.dtype, "keys and values of all ranks")

    def next(self) -> Tensor:
        assert self.buffer is not None
        return self.buffer


def ring_attention(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention: q (batch, heads, seq/cp, head_dim), k and v (batch, kv_heads, seq/cp, head_dim) -> like q,
    with the width of v.

    It saves q, k, v, the output and one fp32 logsumexp per query and head, as without context parallelism.
    """
    out, *statistics = selected(q.memory, ATTENTION, partial(_forward, ring, _plain(q), _plain(k), _plain(v)))
    if recording(q, k, v):
        out.node = Node(q.memory, _backward, (q, k, v), [q, k, v, _plain(out), *statistics], ring)
    return out


def _plain(a: Tensor) -> Tensor:
    """Return the tensor without its grad_fn: no tensor in the ring has one."""
    return Tensor(a.storage, a.shape, a.strides, a.dtype)


def _send(of: Tensor, kind: Kind, name: str, shape: Shape) -> None:
    memory = of.memory
    memory.sent.append(Sent("cp", kind, name, memory.phase, memory.layer, shape, of.dtype))


def _forward(ring: Ring, query: Tensor, key: Tensor, value: Tensor) -> Results:
    """Run _templated_ring_attention on one rank. Rank 0 has no rank before it."""
    key, value = contiguous(key), contiguous(value)
    shapes = key.shape, value.shape
    merger = _Merger()
    rest: list[Tensor] = []
    rotater = ring.rotater()
    for i in range(ring.ranks):
        if i > 0:
            next_kv = rotater.next()
            key, value = _unpacked(next_kv, *shapes)
        if i < ring.ranks - 1:
            next_kv = _packed(key, value)
            rotater.exchange(next_kv)
            del next_kv
        if i == 0:
            q, k, v, late = query, key, value, False
        elif i <= ring.rank:
            q, k, v, late = query, _half(key), _half(value), False
        else:
            q, k, v, late = _half(query), key, value, True
        out, logsumexp, *rest = _kernel(q, k, v, is_causal=i == 0)
        merger.step(out, logsumexp, late=late)
    return *merger.results(), *rest


def _takes_flash(q: Tensor, v: Tensor) -> bool:
    return q.dtype is not fp32 and q.shape[3].size == v.shape[3].size


def _kernel(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Results:
    """Return the output and logsumexp of one kernel, and the memory-efficient kernel's dropout seed and offset."""
    attends(q.memory, q.shape, k.shape, v.shape, q.dtype, is_causal)
    if _takes_flash(q, v):
        return like(q, "attention output"), new_tensor(q.memory, q.shape[:3], fp32, "attention logsumexp")
    shape = (*q.shape[:3], v.shape[3])
    out = new_tensor(q.memory, shape, q.dtype, "attention output", heads_inside(shape))
    logsumexp = new_tensor(q.memory, q.shape[:3], fp32, "attention logsumexp")
    seed, offset = (new_tensor(q.memory, (), int64, f"dropout {name}") for name in ("seed", "offset"))
    return out, logsumexp, seed, offset


def _kernel_gradients(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> list[Tensor]:
    attends_backward(q.memory, q.shape, k.shape, v.shape, q.dtype, is_causal)
    named = tuple(zip((q, k, v), ("query", "key", "value"), strict=True))
    if _takes_flash(q, v):
        out = [like(x, f"{name} gradient") for x, name in named]
        _scratch = flash_scratch(q, k)
        return out
    out = [new_tensor(x.memory, x.shape, x.dtype, f"{name} gradient", heads_inside(x.shape)) for x, name in named]
    _scratch = efficient_scratch(q)
    return out


class _Merger:
    """Merges the outputs and logsumexps of the partial results in fp32 (_SDPAMerger)."""

    def __init__(self) -> None:
        self.out: Tensor | None = None
        self.logsumexp: Tensor | None = None
        self.dtype: DType = fp32

    def step(self, out: Tensor, logsumexp: Tensor, *, late: bool) -> None:
        """Merge one partial result. `late`: it is the result of the late half of the queries."""
        self.dtype = out.dtype
        out = cast(out, fp32, "attention output in fp32")
        self._merge_one(out, logsumexp, late=late)

    def _merge_one(self, block_out: Tensor, block_lse: Tensor, *, late: bool) -> None:
        block_lse = unsqueeze(block_lse, 3)
        if self.out is None or self.logsumexp is None:
            self.out, self.logsumexp = block_out, block_lse
            return
        lse = _half(self.logsumexp) if late else self.logsumexp
        out = _half(self.out) if late else self.out
        out = sub(out, mul(sigmoid(sub(block_lse, lse)), sub(out, block_out)))
        lse = sub(lse, like(sub(lse, block_lse), "logsigmoid"))
        if late:
            self.logsumexp = _with_half(self.logsumexp, lse)
            self.out = _with_half(self.out, out)
        else:
            self.out, self.logsumexp = out, lse

    def results(self) -> Results:
        assert self.out is not None and self.logsumexp is not None
        out = cast(self.out, self.dtype, "attention output")
        return out, squeeze(self.logsumexp, 3)


def _half(a: Tensor) -> Tensor:
    """Compute `a.chunk(2, 2)[i]`: a view of the early or the late chunk."""
    return chunk_dim(a, _SEQ, 2)[0]


def _with_half(whole: Tensor, half: Tensor) -> Tensor:
    """Return a new tensor with one half of `whole` replaced (_partial_update)."""
    return cat((half, _half(whole)), whole.shape[_SEQ], axis=_SEQ)


def _increased(whole: Tensor) -> Tensor:
    """Add to one half of `whole` in place, then join the halves in a new tensor (_partial_update(add=True))."""
    return _with_half(whole, _half(whole))


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Compute `torch.cat([key.flatten(), value.flatten()])`, which first copies operands that are not contiguous."""
    width = _joined(key.shape[3], value.shape[3])
    key, value = contiguous(key), contiguous(value)
    return new_tensor(key.memory, (*key.shape[:3], width), key.dtype, "keys and values")


def _unpacked(pair: Tensor, key: Shape, value: Shape) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of a received tensor as views."""
    key_, value_ = (Tensor(pair.storage, shape, contiguous_strides(shape), pair.dtype) for shape in (key, value))
    return key_, value_


@lru_cache(maxsize=64)
def _joined(key: Dim, value: Dim) -> Dim:
    return Dim(f"2·{key.name}" if key is value else f"({key.name}+{value.name})", key.size + value.size)


@lru_cache(maxsize=1024)
def _of_all(shape: Shape, ranks: int) -> Shape:
    """Return the shape of the tensor that all ranks hold together."""
    return (*shape[:_SEQ], whole_of(shape[_SEQ], ranks, "/cp"), *shape[_SEQ + 1 :])


def _backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    """Run _templated_ring_attention_backward."""
    ring: Ring = node.context
    saved = node.unpack()  # all saved tensors stay until the ring is done
    query, key, value, _out, logsumexp = saved[:5]
    dtype, shapes = key.dtype, (key.shape, value.shape)
    grad_query = like(query, "query gradient, summed", fp32)
    grad_key = like(key, "key gradient, summed", fp32)
    grad_value = like(value, "value gradient, summed", fp32)
    key, value = contiguous(key), contiguous(value)
    kv_rotater = ring.rotater()
    dkv_rotater = AllToAll("gradients of keys and values")
    for i in range(ring.ranks):
        if i > 0:
            buffer = kv_rotater.next()
            key, value = _unpacked(buffer, *shapes)
        if i != ring.ranks - 1:
            next_kv = _packed(key, value)
            kv_rotater.exchange(next_kv)
        if i == 0:
            q, k, v = query, key, value
        elif i <= ring.rank:
            q, k, v = query, _half(key), _half(value)
        else:
            q, k, v = _half(query), key, value
            _lse = contiguous(_half(logsumexp))
        _gradients = _kernel_gradients(q, k, v, is_causal=i == 0)  # they stay until the next part has its own
        if i > 0:
            next_grad_kv = dkv_rotater.next()
            grad_key, grad_value = _unpacked(next_grad_kv, *shapes)
            if i <= ring.rank:
                grad_key = _increased(grad_key)
                grad_value = _increased(grad_value)
        next_grad_kv = _packed(grad_key, grad_value)
        dkv_rotater.exchange(next_grad_kv)
        if i > ring.rank:
            grad_query = _increased(grad_query)
    grad_query = cast(grad_query, query.dtype, "query gradient")
    next_grad_kv = cast(dkv_rotater.next(), dtype, "key and value gradients")
    return [grad_query, *_unpacked(next_grad_kv, *shapes)]
