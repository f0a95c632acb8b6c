"""flash-attn 2 over rows of one length, as transformers runs it (`attn_implementation="flash_attention_2"`).

Queries, keys and values are views of (batch, seq, heads, head_dim). FlashAttnFunc saves them, the output, a logsumexp of each
head and query, and the state of its dropout (flash_attn/flash_attn_interface.py). The output is laid out as the queries. Its
backward has sums and the queries' gradient in fp32, of a multiple of 128 tokens, and where heads share keys and values the
gradients of each head (csrc/flash_attn/flash_api.cpp, mha_fwd and mha_bwd). There is no mask: a window is the kernel's own, and
transformers drops a mask of ones (masking_utils.py, flash_attention_mask).

Not counted: with few heads and tokens for a GPU's processors the forward without dropout splits the keys, and has the parts of
the output in fp32 until it ends (set_params_splitkv).
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, plus
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.shape import transpose
from memcalc.core.ops.work import attends, attends_backward
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended, sdpa_attention
from memcalc.families.base.masks import causal_mask
from memcalc.kernels.flash_operands import NAMES, SOURCE, aligned, as_autocast, cut, tiled

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.families.base.module import Run
    from memcalc.kernels import Kernels

_TOKENS: Final = 128
"""The backward's sums are of a multiple of this many tokens."""


def rounds_tokens(seq_len: int | None) -> bool:
    """Tell whether the backward has sums of more tokens than a sequence."""
    return (seq_len or 0) % _TOKENS != 0


@cache
def with_flash_attention(kernels: Kernels, *, pads: bool) -> Kernels:
    """Return the kernels with flash-attn. `pads`: the backward rounds the tokens up (`rounds_tokens`), so sizes are no
    polynomials in them."""
    replaced: dict[Any, Any] = dict(kernels.replaced)
    replaced[causal_mask] = _no_mask
    replaced[sdpa_attention] = partial(flash_attention, pads=pads)
    return kernels._replace(replaced=tuple(replaced.items()), source=f"{SOURCE}; {kernels.source}", basis="modelled")


def _no_mask(run: Run, window: int | None = None) -> None:
    """Run flash_attention_mask without padding."""
    run.memory.scope = "causal mask"


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, pads: bool) -> Attended:
    """Run flash_attention_forward (integrations/flash_attention.py): (batch, heads, seq, head_dim) -> (batch, seq, heads,
    head_dim). The values of fp32 models under autocast are cast to its dtype."""
    assert mask is None, "flash-attn has no masks"
    query, key, value = (transpose(x, 1, 2) for x in (q, k, v))
    return _flash_attn_func(*as_autocast(query, key, value), pads), None


def _flash_attn_func(q: Tensor, k: Tensor, v: Tensor, pads: bool) -> Tensor:
    """Run flash_attn_func: q (batch, seq, heads, head_dim), k and v (batch, seq, kv_heads, head_dim) -> as q."""
    memory = q.memory
    attends(memory, *heads_first(q, k, v), q.dtype)
    operands = tuple(aligned(x, name) for x, name in zip((q, k, v), ("queries", "keys", "values"), strict=True))
    whole = like(operands[0], "attention output")
    logsumexp = new_tensor(memory, (q.shape[0], q.shape[2], q.shape[1]), fp32, "attention logsumexp")
    state = new_tensor(memory, (Dim("2", 2),), int64, "state of the dropout")
    out = cut(whole, q.shape)
    if recording(q, k, v):
        result = Tensor(whole.storage, whole.shape, whole.strides, whole.dtype)
        out.node = Node(memory, _backward, (q, k, v), (*operands, result, logsumexp, state), pads)
    return out


def _backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    saved = node.unpack()  # all saved tensors stay until the kernel is done
    q, k, v = saved[:3]
    attends_backward(node.memory, *heads_first(q, k, v), q.dtype)
    out = [like(x, f"{name} gradient") for x, name in zip((q, k, v), NAMES, strict=True)]
    _grad = aligned(grads[0], "gradient of the output")
    batch, tokens, heads, width = q.shape
    rows = plus(tokens, -tokens.size % _TOKENS) if node.context else tokens
    _sums = new_tensor(node.memory, (batch, heads, rows), fp32, "attention sums")
    _gradient = new_tensor(node.memory, (batch, rows, heads, tiled(width)), fp32, "query gradient in fp32")
    if k.shape[2].size != heads.size:
        shape = (batch, k.shape[1], heads, width)
        _of_heads = [new_tensor(node.memory, shape, q.dtype, f"{name} gradient of each head") for name in NAMES[1:]]
    return [cut(x, shape) for x, (shape, _) in zip(out, node.metadata, strict=True)]


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Shape, Shape, Shape]:
    """Return the shapes as the products have them."""
    shapes = [(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (q, k, v)]
    return shapes[0], shapes[1], shapes[2]
