"""flash-attn over a padded batch, as transformers runs it: each layer takes the tokens that are no padding out of its queries,
keys and values, and puts the output back between zeros.

Sources: transformers/masking_utils.py (flash_attention_mask: the collator's mask as booleans), modeling_flash_attention_utils.py
(_get_unpad_data, _upad_input, _index_first_axis), flash-attn 2.8.3 flash_attn/bert_padding.py (pad_input, IndexPutFirstAxis) and
its kernel of variable lengths (`memcalc.kernels.packed_attention`). All tokens are counted, as if none was padding.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from memcalc.core.dims import merge, plus
from memcalc.core.dtypes import boolean, int32, int64
from memcalc.core.ops.elementwise import cast
from memcalc.core.ops.routing import index, index_put_
from memcalc.core.ops.shape import reshape, transpose, view
from memcalc.core.selective import MAXIMUM, selected
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended, sdpa_attention
from memcalc.families.base.masks import causal_mask
from memcalc.kernels import flash_attention_3
from memcalc.kernels.flash_operands import SOURCE, as_autocast
from memcalc.kernels.packed_attention import varlen
from memcalc.layout.packing import Packing

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.families.base.module import Run
    from memcalc.kernels import Kernels


@cache
def without_padding(kernels: Kernels, version: int) -> Kernels:
    """Return the kernels with a version of flash-attn over the tokens of a padded batch."""
    replaced: dict[Any, Any] = dict(kernels.replaced)
    replaced[causal_mask] = _mask_of_tokens
    replaced[sdpa_attention] = partial(unpadded_attention, attend=_second if version == 2 else _third)
    source = SOURCE if version == 2 else flash_attention_3.SOURCE
    return kernels._replace(replaced=tuple(replaced.items()), source=f"{source}; {kernels.source}", basis="modelled")


def _second(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    return varlen(q, k, v, Packing(), (bounds,))


def _third(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    rows = flash_attention_3.Rows(Packing(), q.shape[0].parts[1].size)
    return flash_attention_3.varlen(q, k, v, rows, is_local=False, bounds=(bounds,))


def _mask_of_tokens(run: Run, window: int | None = None) -> Tensor:
    """Run create_causal_mask with a padding mask: (batch, seq), whether a token is none. A window is the kernel's own."""
    run.memory.scope = "causal mask"
    assert run.attention_mask is not None
    mask = cast(run.attention_mask, boolean, "padding mask")
    _all = new_tensor(run.memory, (), boolean, "whether no token is padding")
    return mask


def unpadded_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
) -> Attended:
    """Run flash_attention_forward: q, k, v (batch, heads, seq, head_dim), mask (batch, seq) -> (batch, seq, heads, head_dim).

    The caller's frame holds its operands until it returns.
    """
    assert mask is not None, "a padded batch has a mask"
    query, key, value = (transpose(x, 1, 2) for x in (q, k, v))
    query, key, value = as_autocast(query, key, value)
    batch, tokens, heads, width = query.shape
    indices, bounds = _where_tokens_are(mask)
    unpadded_key = _rows(key, indices, "keys of tokens")
    unpadded_value = _rows(value, indices, "values of tokens")
    unpadded_query = _rows(query, indices, "queries of tokens")
    out = attend(unpadded_query, unpadded_key, unpadded_value, bounds)
    zeros = new_tensor(out.memory, (merge(batch, tokens), heads, width), out.dtype, "attention output with padding")
    return view(index_put_(zeros, indices, out), batch, tokens, heads, width), None


def _where_tokens_are(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Run _get_unpad_data: the places of the tokens in all rows (int64), and where each sequence begins (int32)."""
    memory, (batch, tokens) = mask.memory, mask.shape
    _lengths = new_tensor(memory, (batch,), int32, "lengths of sequences")
    indices = new_tensor(memory, (merge(batch, tokens),), int64, "places of tokens")
    selected(memory, MAXIMUM, lambda: (new_tensor(memory, (), int32, "longest sequence"),))
    _summed = new_tensor(memory, (batch,), int32, "summed lengths")
    return indices, new_tensor(memory, (plus(batch, 1),), int32, "beginnings of sequences")


def _rows(x: Tensor, indices: Tensor, name: str) -> Tensor:
    """Run _index_first_axis: (batch, seq, heads, head_dim) -> (tokens, heads, head_dim)."""
    batch, seq, heads, width = x.shape
    return index(reshape(x, merge(batch, seq), heads, width), indices, name)
