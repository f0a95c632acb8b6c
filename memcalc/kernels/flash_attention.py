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
from memcalc.core.ops.elementwise import cast, like, recording
from memcalc.core.ops.shape import transpose
from memcalc.core.ops.work import attends, attends_backward
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended, sdpa_attention
from memcalc.families.base.masks import causal_mask

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.families.base.module import Run
    from memcalc.kernels import Kernels

SOURCE: Final = "flash-attn 2.8.3 flash_attn/flash_attn_interface.py, csrc/flash_attn/flash_api.cpp"
TOKENS: Final = 128
"""The backward's sums are of a multiple of this many tokens."""
WIDEST: Final = 256
"""The widest head that flash-attn takes."""
_ALIGNED: Final = 8
_NAMES: Final = ("query", "key", "value")


@cache
def with_flash_attention(kernels: Kernels, *, pads: bool) -> Kernels:
    """Return the kernels with flash-attn. `pads`: the sequence is no multiple of TOKENS, so sizes are no polynomials in it."""
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
    return _flash_attn_func(*_cast(query, key, value), pads), None


def _cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run fa_peft_integration_check: fp32 queries, and keys and values with them, in autocast's dtype."""
    state = q.memory.autocast
    if q.dtype is not fp32 or state is None or state.dtype is None:
        return q, k, v
    return cast(q, state.dtype), cast(k, state.dtype), cast(v, state.dtype)


def _flash_attn_func(q: Tensor, k: Tensor, v: Tensor, pads: bool) -> Tensor:
    """Run flash_attn_func: q (batch, seq, heads, head_dim), k and v (batch, seq, kv_heads, head_dim) -> as q."""
    memory = q.memory
    attends(memory, *_heads_first(q, k, v), q.dtype)
    operands = tuple(_aligned(x, name) for x, name in zip((q, k, v), ("queries", "keys", "values"), strict=True))
    whole = like(operands[0], "attention output")
    logsumexp = new_tensor(memory, (q.shape[0], q.shape[2], q.shape[1]), fp32, "attention logsumexp")
    state = new_tensor(memory, (Dim("2", 2),), int64, "state of the dropout")
    out = _cut(whole, q.shape)
    if recording(q, k, v):
        result = Tensor(whole.storage, whole.shape, whole.strides, whole.dtype)
        out.node = Node(memory, _backward, (q, k, v), (*operands, result, logsumexp, state), pads)
    return out


def _backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    saved = node.unpack()  # all saved tensors stay until the kernel is done
    q, k, v = saved[:3]
    attends_backward(node.memory, *_heads_first(q, k, v), q.dtype)
    out = [like(x, f"{name} gradient") for x, name in zip((q, k, v), _NAMES, strict=True)]
    _grad = _aligned(grads[0], "gradient of the output")
    batch, tokens, heads, width = q.shape
    rows = plus(tokens, -tokens.size % TOKENS) if node.context else tokens
    _sums = new_tensor(node.memory, (batch, heads, rows), fp32, "attention sums")
    tile = plus(width, -width.size % (32 if width.size <= 128 else 64))
    _gradient = new_tensor(node.memory, (batch, rows, heads, tile), fp32, "query gradient in fp32")
    if k.shape[2].size != heads.size:
        shape = (batch, k.shape[1], heads, width)
        _of_heads = [new_tensor(node.memory, shape, q.dtype, f"{name} gradient of each head") for name in _NAMES[1:]]
    return [_cut(x, shape) for x, (shape, _) in zip(out, node.metadata, strict=True)]


def _aligned(x: Tensor, name: str) -> Tensor:
    """Return x (batch, seq, heads, head_dim) if its heads are aligned, else a copy with wider heads."""
    width = x.shape[3]
    if not width.size % _ALIGNED:
        return x
    shape = (*x.shape[:3], plus(width, -width.size % _ALIGNED))
    return new_tensor(x.memory, shape, x.dtype, f"{name} with aligned heads")


def _cut(x: Tensor, shape: Shape) -> Tensor:
    """Return `x[..., :head_dim]`, a view if x is wider."""
    return x if x.shape[3].size == shape[3].size else Tensor(x.storage, shape, x.strides, x.dtype)


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Shape, Shape, Shape]:
    """Return the shapes as the products have them."""
    shapes = [(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (q, k, v)]
    return shapes[0], shapes[1], shapes[2]
