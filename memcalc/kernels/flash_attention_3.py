"""flash-attn 3 on Hopper, as transformers runs it (`attn_implementation="flash_attention_3"`).

FlashAttnFunc saves queries, keys, values, the output and a logsumexp of each head and query; there is no dropout, so no state of
one (hopper/flash_attn_interface.py). Its forward has counters for its scheduler. Its backward has sums, the logsumexp in base 2
and the queries' gradient in fp32, of whole tiles of tokens, and where heads share keys and values these heads' gradients in
fp32 too (hopper/flash_api.cpp, mha_fwd and mha_bwd). With variable lengths (FlashAttnVarlenFunc) all sequences are one dim,
which is longer by a tile for each of them.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, plus
from memcalc.core.dtypes import boolean, fp32, int32
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.shape import reshape, transpose, view
from memcalc.core.ops.work import attends, attends_backward
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended, sdpa_attention
from memcalc.families.base.masks import causal_mask, packed_sequences
from memcalc.kernels.flash_attention import heads_first
from memcalc.kernels.flash_operands import NAMES, as_autocast
from memcalc.kernels.packed_attention import of_each_sequence
from memcalc.layout.packing import documents

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.families.base.module import Run
    from memcalc.kernels import Kernels
    from memcalc.layout.packing import Packing

SOURCE: Final = "flash-attn 3.0.0 hopper/flash_attn_interface.py, hopper/flash_api.cpp"
_WIDTHS: Final = (64, 96, 128, 192, 256)
"""The widths of heads that there are kernels for: a narrower head is computed as one of these."""


class _Tiles(NamedTuple):
    """The tiles of the backward on Hopper, for causal attention."""

    width: int
    """The width that heads are rounded up to."""
    queries: int
    keys: int


class Rows(NamedTuple):
    """The sequences of variable lengths that are one dim."""

    packing: Packing
    longest: int


def tiles(width: int) -> _Tiles:
    """Return the tiles for heads of a width."""
    rounded = next(one for one in _WIDTHS if width <= one)
    return _Tiles(rounded, 128 if rounded == 64 else 64, 128 if rounded <= 128 else 96 if rounded == 192 else 80)


@cache
def with_flash_attention_3(kernels: Kernels) -> Kernels:
    """Return the kernels with flash-attn 3 over rows of one length."""
    return _replaced(kernels, _window, flash_attention)


@cache
def over_packed_rows(kernels: Kernels, rows: Rows) -> Kernels:
    """Return the kernels with flash-attn 3 over packed rows."""
    return _replaced(kernels, partial(_window_of_packed, rows.longest), partial(packed_attention, rows=rows))


def _replaced(kernels: Kernels, mask: Any, attention: Any) -> Kernels:
    replaced: dict[Any, Any] = {**dict(kernels.replaced), causal_mask: mask, sdpa_attention: attention}
    return kernels._replace(replaced=tuple(replaced.items()), source=f"{SOURCE}; {kernels.source}", basis="modelled")


def _window(run: Run, window: int | None = None) -> Tensor | None:
    """Run flash_attention_mask without padding. A window is the kernel's own: a tensor without elements stands for one that is
    shorter than the sequence."""
    run.memory.scope = "causal mask"
    return _marked(run, window, run.seq.size)


def _window_of_packed(longest: int, run: Run, window: int | None = None) -> Tensor | None:
    """Run create_causal_mask with the collator's positions, as `_window`."""
    packed_sequences(run)
    return _marked(run, window, longest)


def _marked(run: Run, window: int | None, longest: int) -> Tensor | None:
    if window is None or longest <= window:
        return None
    return new_tensor(run.memory, (Dim("0", 0),), boolean, "window")


# --- rows of one length


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
    """Run flash_attention_forward (integrations/flash_attention.py): (batch, heads, seq, head_dim) -> (batch, seq, heads,
    head_dim). The values of fp32 models under autocast are cast to its dtype."""
    query, key, value = (transpose(x, 1, 2) for x in (q, k, v))
    return _flash_attn_func(*as_autocast(query, key, value), is_local=mask is not None), None


def _flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, is_local: bool) -> Tensor:
    """Run flash_attn_func: q (batch, seq, heads, head_dim), k and v (batch, seq, kv_heads, head_dim) -> as q, contiguous."""
    memory = q.memory
    attends(memory, *heads_first(q, k, v), q.dtype)
    out = new_tensor(memory, q.shape, q.dtype, "attention output")
    logsumexp = new_tensor(memory, (q.shape[0], q.shape[2], q.shape[1]), fp32, "attention logsumexp")
    if q.shape[1].size > 1:
        _counters = _scheduler(q, q.shape[0].size, 1 if is_local else 2)
    if recording(q, k, v):
        out.node = Node(memory, _backward, (q, k, v), (q, k, v, _plain(out), logsumexp))
    return out


def _backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    saved = node.unpack()  # all saved tensors stay until the kernel is done
    q, k, v = saved[:3]
    attends_backward(node.memory, *heads_first(q, k, v), q.dtype)
    batch, tokens, heads, width = q.shape
    tile = tiles(width.size)
    whole, keys = _up(tokens, tile.queries), _up(k.shape[1], tile.keys)
    return _gradients(q, k, v, (batch, heads, whole), (batch, k.shape[2], keys), whole.size // tile.queries, batch)


# --- variable lengths


def packed_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, rows: Rows) -> Attended:
    """Run flash_attention_forward with `cu_seq_lens_q`: (1, heads, tokens, head_dim) -> (1, tokens, heads, head_dim)."""
    query, key, value = (transpose(x, 1, 2) for x in (q, k, v))
    query, key, value = (reshape(x, *x.shape[1:]) for x in as_autocast(query, key, value))
    out = varlen(query, key, value, rows, is_local=mask is not None)
    return view(out, q.shape[0], *out.shape), None


def varlen(q: Tensor, k: Tensor, v: Tensor, rows: Rows, *, is_local: bool, bounds: tuple[Tensor, ...] = ()) -> Tensor:
    """Run flash_attn_varlen_func: q (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim) -> as q. It saves `bounds`,
    where the sequences begin; those of a batch are kept anyway."""
    memory = q.memory
    attends(memory, *of_each_sequence(q, k, v, rows.packing), q.dtype)
    out = new_tensor(memory, q.shape, q.dtype, "attention output")
    logsumexp = new_tensor(memory, (q.shape[1], q.shape[0]), fp32, "attention logsumexp")
    vectors = 3 if is_local or rows.longest == 1 else 4
    _counters = _scheduler(q, documents(q.shape[0], rows.packing.of_each).size, vectors)
    if recording(q, k, v):
        saved = (q, k, v, _plain(out), logsumexp, *bounds)
        out.node = Node(memory, _varlen_backward, (q, k, v), saved, rows)
    return out


def _varlen_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    saved = node.unpack()  # all saved tensors stay until the kernel is done
    q, k, v = saved[:3]
    rows: Rows = node.context
    attends_backward(node.memory, *of_each_sequence(q, k, v, rows.packing), q.dtype)
    tokens, heads, width = q.shape
    tile, count = tiles(width.size), documents(tokens, rows.packing.of_each)
    queries, keys = (_up(plus(tokens, size * count.size), size) for size in (tile.queries, tile.keys))
    return _gradients(q, k, v, (heads, queries), (k.shape[1], keys), -(-rows.longest // tile.queries), count)


# --- both


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, queries: Shape, keys: Shape, blocks: int, sequences: Dim
) -> list[Tensor]:
    """Run mha_bwd. `queries` and `keys` are the shapes of what it has of each head and token, `blocks` the tiles of a sequence's
    queries."""
    memory, width = q.memory, q.shape[-1]
    rounded = plus(width, tiles(width.size).width - width.size)
    out = [like(x, f"{name} gradient") for x, name in zip((q, k, v), NAMES, strict=True)]
    _sums = new_tensor(memory, queries, fp32, "attention sums")
    _base_2 = new_tensor(memory, queries, fp32, "attention logsumexp in base 2")
    _gradient = new_tensor(memory, (*queries, rounded), fp32, "query gradient in fp32")
    if k.shape[-2].size != q.shape[-2].size:
        _shared = [new_tensor(memory, (*keys, rounded), fp32, f"{name} gradient in fp32") for name in NAMES[1:]]
    _locks = new_tensor(memory, (_fixed(blocks), sequences, q.shape[-2]), int32, "locks of the query gradient")
    return out


def _scheduler(q: Tensor, sequences: int, vectors: int) -> Tensor:
    """Allocate a counter, and `vectors` of a number for each sequence (tile_count_semaphore), which are multiples of 4."""
    counters = 1 + vectors * (-(-sequences // 4) * 4)
    return new_tensor(q.memory, (_fixed(counters),), int32, "counters of the scheduler")


def _plain(out: Tensor) -> Tensor:
    return Tensor(out.storage, out.shape, out.strides, out.dtype)


def _up(dim: Dim, multiple: int) -> Dim:
    return plus(dim, -dim.size % multiple)


def _fixed(size: int) -> Dim:
    return Dim(str(size), size)
