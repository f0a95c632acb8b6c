"""Attention over packed rows, as transformers runs it: flash-attn with variable lengths, or sdpa with a mask of blocks.

With flash-attn the tokens of all rows are one dim (transformers/modeling_flash_attention_utils.py, `_flash_attention_forward`
with `cu_seq_lens_q`). FlashAttnVarlenFunc saves queries, keys, values, the output, a logsumexp of each head and token, and the
state of its dropout (flash_attn/flash_attn_interface.py). Its backward pads its sums by 128 tokens for each sequence
(csrc/flash_attn/flash_api.cpp, mha_varlen_bwd). Positions are still looked through for packed sequences, though no mask
comes of it (transformers/masking_utils.py, `_preprocess_mask_arguments`).

With sdpa the mask is (1, 1, tokens, tokens), of all tokens of a micro-batch: True within a sequence, and not after the query.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.shape import reshape, transpose, view
from memcalc.core.ops.work import attends, attends_backward
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended, sdpa_attention
from memcalc.families.base.masks import causal_mask, packed_causal_mask, packed_sequences
from memcalc.kernels.flash_operands import NAMES, SOURCE, aligned, as_autocast, cut, tiled
from memcalc.layout.packing import documents

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.families.base.module import Run
    from memcalc.kernels import Kernels
    from memcalc.layout.packing import Packing

PADDED_TOKENS: Final = 128
"""The tokens by which the backward's sums are longer for each sequence."""


@cache
def over_packed_rows(kernels: Kernels, attention: str, packing: Packing) -> Kernels:
    """Return the kernels with attention over packed rows."""
    replaced: dict[Any, Any] = dict(kernels.replaced)
    if attention != "flash":
        replaced[causal_mask] = packed_causal_mask
        return kernels._replace(replaced=tuple(replaced.items()))
    replaced[causal_mask] = _no_mask
    replaced[sdpa_attention] = partial(flash_attention, packing=packing)
    return kernels._replace(replaced=tuple(replaced.items()), source=f"{SOURCE}; {kernels.source}", basis="modelled")


def _no_mask(run: Run, window: int | None = None) -> None:
    """Run create_causal_mask with flash-attn and the collator's positions. A window is the kernel's own."""
    packed_sequences(run)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, packing: Packing) -> Attended:
    """Run flash_attention_forward (integrations/flash_attention.py): (1, heads, tokens, head_dim) -> (1, tokens, heads,
    head_dim). The values of fp32 models under autocast are cast to its dtype."""
    query, key, value = (transpose(x, 1, 2) for x in (q, k, v))
    query, key, value = as_autocast(query, key, value)
    query, key, value = (reshape(x, *x.shape[1:]) for x in (query, key, value))
    out = varlen(query, key, value, packing)
    return view(out, q.shape[0], *out.shape), None


def varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, bounds: tuple[Tensor, ...] = ()) -> Tensor:
    """Run flash_attn_varlen_func: q (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim) -> as q. It saves `bounds`,
    where the sequences begin; those of a batch are kept anyway."""
    memory = q.memory
    attends(memory, *of_each_sequence(q, k, v, packing), q.dtype)
    operands = tuple(aligned(x, name) for x, name in zip((q, k, v), ("queries", "keys", "values"), strict=True))
    whole = like(operands[0], "attention output")  # laid out as the queries (empty_like)
    logsumexp = new_tensor(memory, (q.shape[1], q.shape[0]), fp32, "attention logsumexp")
    state = new_tensor(memory, (Dim("2", 2),), int64, "state of the dropout")
    out = cut(whole, q.shape)
    if recording(q, k, v):
        result = Tensor(whole.storage, whole.shape, whole.strides, whole.dtype)
        out.node = Node(memory, _varlen_backward, (q, k, v), (*operands, result, logsumexp, *bounds, state), packing)
    return out


def _varlen_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    saved = node.unpack()  # all saved tensors stay until the kernel is done
    q, k, v = saved[:3]
    attends_backward(node.memory, *of_each_sequence(q, k, v, node.context), q.dtype)
    out = [like(x, f"{name} gradient") for x, name in zip((q, k, v), NAMES, strict=True)]
    _grad = aligned(grads[0], "gradient of the output")
    tokens, heads, width = q.shape
    padded = _padded(tokens, node.context.of_each)
    _sums = new_tensor(node.memory, (heads, padded), fp32, "attention sums")
    _gradient = new_tensor(node.memory, (padded, heads, tiled(width)), fp32, "query gradient in fp32")
    if k.shape[1].size != heads.size:
        _of_heads = [new_tensor(node.memory, q.shape, q.dtype, f"{name} gradient of each head") for name in NAMES[1:]]
    return [cut(x, shape) for x, (shape, _) in zip(out, node.metadata, strict=True)]


@lru_cache(maxsize=1024)
def _padded(tokens: Dim, of_each: int) -> Dim:
    """Return the tokens of all sequences, each longer by PADDED_TOKENS."""
    count = documents(tokens, of_each)
    poly = tuple(a + PADDED_TOKENS * b for a, b in zip(tokens.poly, count.poly, strict=True))
    name = f"{tokens.name}+{PADDED_TOKENS}·{count.name}"
    return Dim(name, tokens.size + PADDED_TOKENS * count.size, poly)  # type: ignore[arg-type]


def of_each_sequence(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> tuple[Shape, Shape, Shape]:
    """Return the shapes of queries, keys and values as the products have them: each query with the keys of its own
    sequence."""
    batch, seq = q.shape[0].parts
    keys = seq if packing.attended is None else Dim("attended", packing.attended)
    own = (batch, q.shape[1], seq, q.shape[2])
    return own, (batch, k.shape[1], keys, k.shape[2]), (batch, v.shape[1], keys, v.shape[2])
