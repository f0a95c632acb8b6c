"""Attention over sequences that ranks share, as DeepSpeed runs it in transformers' models (Ulysses, arXiv 2309.14509).
Ranks exchange heads for tokens, so that a rank attends over the whole sequence with its part of the heads.

Source: DeepSpeed 0.19.8 deepspeed/runtime/sequence_parallel/ulysses_sp.py (UlyssesSPAttentionHF), which replaces
transformers' attention interface, and deepspeed/sequence/layer.py (_dim_zero_all_to_all). If there are fewer key/value
heads than ranks, each head is repeated and sent to several ranks. A mask is dropped: sdpa's own causal mask is the only
one. NCCL joins the list that positions are gathered into in one more buffer, 8 bytes a token. It does so before
anything larger is allocated, so this buffer is never at a peak.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from inspect import unwrap
from typing import TYPE_CHECKING, Final

from memcalc.core.autograd import Node
from memcalc.core.dims import ONE_DIM, Dim, merge, whole_of
from memcalc.core.dtypes import int64
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.shape import cat, clone, contiguous, expand, reshape, transpose, unsqueeze
from memcalc.core.tensor import Sent, Tensor, new_tensor
from memcalc.families.base.blocks import Attended, sdpa_attention
from memcalc.kernels import Kernels
from memcalc.layout.ulysses import group_dim

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.core.dims import Shape
    from memcalc.layout.collectives import Kind

SOURCE: Final = "DeepSpeed 0.19.8 deepspeed/runtime/sequence_parallel/ulysses_sp.py"


@cache
def over_ranks(kernels: Kernels, ranks: int) -> Kernels:
    """Return the kernels with attention over sequences that `ranks` ranks share."""
    replaced = dict(kernels.replaced)
    own = replaced[sdpa_attention] if sdpa_attention in replaced else unwrap(sdpa_attention)
    replaced[sdpa_attention] = partial(shared_attention, attend=own, ranks=ranks)
    return kernels._replace(replaced=tuple(replaced.items()), source=f"{SOURCE}; {kernels.source}", basis="modelled")


def shared_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, attend: Callable[..., Attended], ranks: int
) -> Attended:
    """Compute attention: q, k, v (batch, heads, seq/cp, head_dim), k and v with their heads -> (batch, seq/cp,
    heads·head_dim), contiguous.

    The caller makes the last copy: the output arrives laid out as (seq/cp, batch, heads·head_dim).
    """
    output, weights = _over_whole_sequence(q, k, v, attend, ranks)
    return contiguous(output), weights


def _over_whole_sequence(q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Attended], ranks: int) -> Attended:
    """Run UlyssesSPAttentionHF.forward. Its named tensors stay until it returns."""
    q, k, v = _tokens_first(q), _tokens_first(k), _tokens_first(v)
    _positions = _gathered_positions(q, ranks)
    query = _to_heads(q, ranks, "queries")
    key = _to_heads(k, ranks, "keys")
    value = _to_heads(v, ranks, "values")
    query = contiguous(_heads_first(query))
    key = contiguous(_heads_first(key))
    value = contiguous(_heads_first(value))
    context, weights = attend(query, key, value, None)
    context = transpose(context, 0, 1)
    context = reshape(context, *context.shape[:2], merge(*context.shape[2:]))
    output = _to_tokens(context, merge(q.shape[2], v.shape[3]), ranks)
    return transpose(output, 0, 1), weights


def _tokens_first(x: Tensor) -> Tensor:
    """Return (batch, heads, seq, head_dim) as (seq, batch, heads, head_dim): a view."""
    return transpose(transpose(x, 1, 2), 0, 1)


def _heads_first(x: Tensor) -> Tensor:
    """Return (seq, batch, heads, head_dim) as (batch, heads, seq, head_dim): a view."""
    return transpose(transpose(x, 0, 1), 1, 2)


def _gathered_positions(q: Tensor, ranks: int) -> tuple[list[Tensor], Tensor]:
    """Gather the position_ids of all ranks (int64): a list of them, and the joined tensor."""
    seq, batch = q.shape[:2]
    whole = whole_of(seq, ranks, "/cp")
    listed = [new_tensor(q.memory, (batch, seq), int64, "position ids of a rank") for _ in range(ranks)]
    q.memory.sent.append(
        Sent("cp", "all_gather", "position ids", q.memory.phase, q.memory.layer, (batch, whole), int64)
    )
    return listed, cat(listed, whole)


def _to_heads(x: Tensor, ranks: int, name: str) -> Tensor:
    """Run combine_sequence: (seq/cp, batch, heads, head_dim) -> (seq, batch, heads/cp, head_dim)."""
    seq, batch, heads, width = x.shape
    by_rank, own = group_dim(ranks), _own(heads, ranks)
    if ranks > heads.size:
        own = ONE_DIM
        x = _repeated(x, ranks // heads.size, by_rank)
    x = reshape(x, seq, batch, by_rank, own, width)
    x = contiguous(transpose(transpose(x, 1, 2), 0, 1))
    received = _exchanged(x, name)
    return reshape(received, whole_of(seq, ranks, "/cp"), batch, own, width)


@lru_cache(maxsize=1024)
def _own(dim: Dim, ranks: int) -> Dim:
    """Return one of `ranks` equal parts of a dim."""
    return Dim(f"{dim.name}/cp", dim.size // ranks, tuple(c // ranks for c in dim.poly))  # type: ignore[arg-type]


def _repeated(x: Tensor, times: int, heads: Dim) -> Tensor:
    """Compute `x.repeat_interleave(times, dim=2)`: a contiguous copy of an expanded view."""
    seq, batch, few, width = x.shape
    copies = expand(unsqueeze(x, 3), seq, batch, few, Dim(str(times), times), width)
    return reshape(clone(copies), seq, batch, heads, width)


def _to_tokens(x: Tensor, hidden: Dim, ranks: int) -> Tensor:
    """Run _partition_global_sequence: (seq, batch, heads/cp·head_dim) -> (seq/cp, batch, heads·head_dim)."""
    whole, batch, own = x.shape
    seq = _own(whole, ranks)
    x = contiguous(reshape(x, group_dim(ranks), seq, batch, own))
    received = _exchanged(x, "attention output")
    received = transpose(transpose(received, 0, 1), 1, 2)
    return reshape(received, seq, batch, hidden)


def _exchanged(x: Tensor, name: str) -> Tensor:
    """Run _dim_zero_all_to_all on a contiguous tensor. It saves nothing; backward exchanges the gradient in the same
    way."""
    out = _sent(x, name)
    if recording(x):
        out.node = Node(x.memory, _exchanged_backward, (x,), (), name)
    return out


def _exchanged_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [_sent(contiguous(grads[0]), f"gradient of {node.context}")]


def _sent(x: Tensor, name: str) -> Tensor:
    """Send a tensor in an all-to-all and return the received one, which has the same shape.

    One of the two holds a rank's tokens of each rank's heads, the other each rank's tokens of its own heads.
    """
    by_rank, part, *rest = x.shape
    _note(x, "all_to_all", name, (whole_of(part, by_rank.size, "/cp"), *rest))
    return new_tensor(x.memory, x.shape, x.dtype, f"{name}, received")


def _note(x: Tensor, kind: Kind, name: str, shape: Shape) -> None:
    x.memory.sent.append(Sent("cp", kind, name, x.memory.phase, x.memory.layer, shape, x.dtype))
