"""Scaled dot-product attention: one kernel, or the products that torch makes where no kernel takes the operands.

The fused kernels save q, k, v, their output, one fp32 logsumexp per query and head, and the mask if there is one
(derivatives.yaml: _scaled_dot_product_flash_attention, _scaled_dot_product_efficient_attention). Without a mask,
grouped k and v stay grouped. A boolean mask becomes an additive one in the dtype of q, again in every layer
(native/transformers/attention.cpp, convert_boolean_attn_mask). The output is laid out as q, the three gradients as
(batch, seq, heads, head_dim).

If values are not as wide as keys, CUDA has one fused kernel, the memory-efficient one. Its output is laid out as
(batch, seq, heads, head_dim). It also saves the seed and offset of its dropout. Its logsumexp is padded to a multiple
of 32 queries (native/transformers/cuda/attention.cu, kAlignLSE).

If a bias requires a gradient, CUDA takes the same kernel (sdp_utils.cpp; flash attention has no bias). This kernel reads
rows that begin at multiples of 8 elements. Any other bias or mask is copied into a tensor with more columns, and the
kernel gets a slice of it (native/transformers/attention.cpp, preprocess_mask), expanded to all batches and heads as a
view. The gradient of a bias covers all batches and heads, with rows of a multiple of 16
(native/transformers/cuda/attention_backward.cu).

With any other mask, and values as wide as the keys, this is the CPU's flash kernel, as traced. CUDA has no flash kernel
for masks: it takes the memory-efficient one, or cuDNN's. The additive mask has the same size there, (batch, 1, seq,
seq), and expanding it over the heads is a view. Where seq is no multiple of 8, the mask is copied as a bias is, and the
copy is what is saved.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, plus
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.attention_scratch import efficient_scratch, flash_scratch
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.axes import narrow, pad_dim
from memcalc.core.ops.elementwise import add_, cast, like, recording, scale, softmax
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.replaceable import replaceable
from memcalc.core.ops.selection import where
from memcalc.core.ops.shape import clone, expand, transpose, unsqueeze, view
from memcalc.core.ops.work import attends, attends_backward
from memcalc.core.selective import ATTENTION, Results, selected
from memcalc.core.tensor import Strides, Tensor, contiguous_strides, new_tensor

if TYPE_CHECKING:
    from memcalc.core.dims import Dim, Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Memory

SCORES: Final = "scores of the math kernel"
"""The name of the math kernel's product of queries and keys."""
ALIGNED_QUERIES: Final = 32
"""The memory-efficient kernel pads its logsumexp to a multiple of this many queries."""
ALIGNED_BIAS: Final = 8
"""The memory-efficient kernel reads rows of its bias that begin at multiples of this many elements."""
ALIGNED_BIAS_GRADIENT: Final = 16
"""The memory-efficient kernel pads rows of the bias's gradient to a multiple of this many elements."""


def heads_inside(shape: Shape) -> Strides:
    """Return the strides of (batch, heads, seq, head_dim) laid out as (batch, seq, heads, head_dim)."""
    batch, heads, seq, width = contiguous_strides((shape[0], shape[2], shape[1], shape[3]))
    return (batch, seq, heads, width)


@replaceable
@autocast("scaled_dot_product_attention")
def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = True) -> Tensor:
    """Compute attention: q (batch, heads, seq, head_dim), k and v (batch, kv_heads, seq, head_dim) -> (batch, heads,
    seq, head_dim).

    `causal`: whether queries without a mask see earlier tokens only. If the GPU is known,
    memcalc.kernels.attention_on_gpu chooses the kernel instead.
    """
    return fused_attention(q, k, v, mask, takes_efficient(q, v, mask), causal)


def takes_efficient(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Tell whether every CUDA GPU would take the memory-efficient kernel."""
    return (mask is not None and recording(mask)) or q.shape[3].size != v.shape[3].size


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, efficient: bool, causal: bool) -> Tensor:
    """Compute attention in one kernel: the memory-efficient one or flash attention. With a mask it computes every score."""
    is_causal = causal and mask is None
    if mask is not None and mask.dtype is boolean:
        mask = where(mask, new_tensor(q.memory, (), q.dtype, "zero"), "additive mask")
    biased = mask is not None and recording(mask)
    if mask is not None and efficient:
        mask = expand(aligned_bias(mask), *q.shape[:3], k.shape[2])
    out, *statistics = selected(q.memory, ATTENTION, partial(_efficient if efficient else _flash, q, k, v, is_causal))
    if recording(q, k, v):
        result = Tensor(out.storage, out.shape, out.strides, out.dtype)
        saved = [q, k, v, *([] if mask is None else [mask]), result, *statistics]
        backward = _efficient_backward if efficient or mask is not None else _flash_backward
        out.node = Node(
            q.memory, backward, (q, k, v, *([mask] if mask is not None and biased else [])), saved, is_causal
        )
    return out


def aligned_bias(bias: Tensor) -> Tensor:
    """Return the bias if its rows are aligned, else a copy with more columns, cut to the bias's columns."""
    *rows, column = bias.strides
    if column == 1 and not any(stride % ALIGNED_BIAS for stride in rows):
        return bias
    keys = bias.shape[3]
    padded = pad_dim(bias, 3, plus(keys, ALIGNED_BIAS - keys.size % ALIGNED_BIAS))
    return narrow(padded, 3, keys)


def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Results:
    """Return the output and logsumexp of flash attention."""
    attends(q.memory, q.shape, k.shape, v.shape, q.dtype, is_causal)
    return like(q, "attention output"), new_tensor(q.memory, q.shape[:3], fp32, "attention logsumexp")


def _efficient(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Results:
    """Return the output and logsumexp of the memory-efficient kernel, and its dropout's seed and offset."""
    attends(q.memory, q.shape, k.shape, v.shape, q.dtype, is_causal)
    shape = (*q.shape[:3], v.shape[3])
    out = new_tensor(q.memory, shape, q.dtype, "attention output", heads_inside(shape))
    batch, heads, queries, _ = q.shape
    padded = plus(queries, -queries.size % ALIGNED_QUERIES)
    q.memory.pads_queries = True
    logsumexp = new_tensor(q.memory, (batch, heads, padded), fp32, "attention logsumexp")
    seed, offset = (new_tensor(q.memory, (), int64, f"dropout {name}") for name in ("seed", "offset"))
    return out, logsumexp, seed, offset


@autocast("scaled_dot_product_attention")
def math_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """Compute attention where no fused kernel takes the operands, as with a mask and fewer heads in k and v than in q.

    Half precision is computed in fp32 (native/transformers/attention.cpp, _scaled_dot_product_attention_math). Without
    a mask, heads that share a key and a value get copies of them (`enable_gqa`; with a mask one head is broadcast).
    `causal` makes the op build a causal mask itself.
    """
    if mask is not None and mask.dtype is boolean:
        mask = where(mask, new_tensor(q.memory, (), q.dtype, "zero"), "additive mask")
    query, key, value = cast(q, fp32), cast(k, fp32), cast(v, fp32)
    keys, values = key, value  # names of their own: all four stay to the end
    scaled_query = scale(query, "mul")
    if mask is None:
        mask = _causal_mask(query, key) if causal else None
        keys, values = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    attn = matmul(scaled_query, scale(transpose(keys, 2, 3), "mul"), SCORES)
    if mask is not None:
        attn = add_(attn, mask)
    attn = _safe_softmax(attn)
    _weights = cast(attn, q.dtype)  # the op's second output
    return cast(matmul(attn, values, "attention output"), q.dtype)


def _safe_softmax(scores: Tensor) -> Tensor:
    """Compute softmax, and look for rows that are masked as a whole (native/SoftMax.cpp)."""
    out = softmax(scores)
    _is_masked = like(scores, "masked scores", boolean)
    return out


def _repeated(x: Tensor, heads: Dim) -> Tensor:
    """Compute `x.repeat_interleave(heads / kv_heads, dim=1)`: a copy, also of a single head."""
    batch, kv_heads, seq, width = x.shape
    if heads.size == kv_heads.size:
        return x
    groups = Dim("heads/kv_heads", heads.size // kv_heads.size)
    copied = clone(expand(unsqueeze(x, 2), batch, kv_heads, groups, seq, width))
    return view(copied, batch, heads, seq, width)


def _causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """Compute `ones(queries, keys).tril()` as 0 and -inf."""
    shape = (query.shape[2], key.shape[2])
    ones = new_tensor(query.memory, shape, boolean, "ones")
    lower = new_tensor(query.memory, shape, boolean, "causal mask")
    del ones
    return where(lower, new_tensor(query.memory, (), query.dtype, "zero"), "additive causal mask")


def _flash_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    saved = node.unpack()  # all saved tensors stay until the kernel is done
    out = _gradients(node, saved)
    _scratch = flash_scratch(*saved[:2])
    return out


def _efficient_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    """Run the memory-efficient kernel, which also takes masks; and what takes them on a GPU of an unknown kind."""
    saved = node.unpack()
    out = _gradients(node, saved)
    _scratch = efficient_scratch(saved[0])
    return out


def _gradients(node: Node, saved: list[Tensor]) -> list[Tensor]:
    attends_backward(node.memory, saved[0].shape, saved[1].shape, saved[2].shape, saved[0].dtype, node.context)
    grads_of_qkv = [
        new_tensor(t.memory, t.shape, t.dtype, f"{name} gradient", heads_inside(t.shape))
        for t, name in zip(saved[:3], ("query", "key", "value"), strict=True)
    ]
    return [*grads_of_qkv, *(_bias_gradient(node.memory, shape, dtype) for shape, dtype in node.metadata[3:])]


def _bias_gradient(memory: Memory, shape: Shape, dtype: DType) -> Tensor:
    """Return the gradient of a bias: padded rows, cut to the bias's columns."""
    *rows, keys = shape
    padded = (*rows, plus(keys, -keys.size % ALIGNED_BIAS_GRADIENT))
    return narrow(new_tensor(memory, padded, dtype, "bias gradient"), 3, keys)
