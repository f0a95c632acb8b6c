"""Megatron-Core 0.16.1 with Transformer Engine 2.11: the tensors that their kernels save, without parallel layouts.

Norms save their input and fp32 statistics (transformer_engine/pytorch/csrc/extensions/normalization.cpp). An activation
or a gated unit saves only its input (megatron/core/fusions/fused_bias_gelu.py, fused_bias_swiglu.py). Rotary positions
save only the angles (transformer_engine/pytorch/attention/rope.py). A bias is added inside the kernel that follows;
dropout keeps one byte per element.

`--attention eager` is Megatron-Core's DotProductAttention with its fused softmax, the attention of Korthikanti et al.
2022 (arXiv 2205.05198). `sdpa` is Transformer Engine's FusedAttention (cuDNN). `flash` is its FlashAttention (the
flash-attn package), which it takes on GPUs before Hopper (get_attention_backend in
transformer_engine/pytorch/attention/dot_product_attention/utils.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.autograd import Node
from memcalc.core.checkpoint import checkpoint
from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import DType, boolean, fp32, int64
from memcalc.core.ops import norm
from memcalc.core.ops.attention import heads_inside, scaled_dot_product_attention
from memcalc.core.ops.elementwise import activation, dropout, like, recording
from memcalc.core.ops.shape import clone, contiguous, transpose
from memcalc.core.ops.work import works, works_backward
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families import gpt2
from memcalc.families.base import blocks, masks
from memcalc.kernels.liger import alias, packed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memcalc.core.ops.replaceable import Replacements
    from memcalc.families.base.blocks import Attended
    from memcalc.families.base.module import Module, Run

# --- norms


def either_norm(m: Module, x: Tensor, *, rms: bool) -> Tensor:
    """Run a module's RMSNorm or LayerNorm."""
    if rms:
        return rms_norm(m, x)
    with m:
        return layer_norm(x, m.weight(), m.weight("bias"))


def rms_norm(m: Module, hidden_states: Tensor) -> Tensor:
    """Run RMSNorm. It saves its input and an fp32 rstd per row."""
    with m:
        return _norm(hidden_states, (m.weight(),), ("rstd",))


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Run LayerNorm. It saves its input and fp32 mean and rstd per row."""
    return _norm(x, tuple(t for t in (weight, bias) if t is not None), ("mean", "rstd"))


def _norm(x: Tensor, weights: tuple[Tensor, ...], statistics: tuple[str, ...]) -> Tensor:
    given, x = x, packed(x)
    out = new_tensor(x.memory, x.shape, x.dtype, "norm")
    kept = [new_tensor(x.memory, x.shape[:-1], fp32, f"norm {name}") for name in statistics]
    if recording(given, *weights):
        out.node = Node(x.memory, _norm_backward, (given, *weights), (x, *weights, *kept))
    return out


def _norm_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    saved = node.unpack()
    _grad = packed(grads[0])
    return [like(t, "norm gradient") for t in saved[: len(node.edges)]]


# --- activations and gated units


def act(x: Tensor, name: str) -> Tensor:
    """Run GeLUFunction. It saves its input."""
    return activation(x, "gelu")


def gated(gate: Module, up: Module, x: Tensor, name: str) -> Tensor:
    """Run SwiGLUFunction over the output of one projection, here gate and up. It saves that output; the gradient is as
    large."""
    return _gated(gate.linear(x), up.linear(x))


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    out = like(gate, "gated")
    if recording(gate, up):
        out.node = Node(gate.memory, _gated_backward, (gate, up), (gate, up))
    return out


def _gated_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [like(t, "gated gradient") for t in node.unpack()]


# --- attention


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Run FusedRoPEFunc for q and for k: new tensors, packed by token. It saves the angles, which are as large as cos
    and sin."""
    return rotated(q, cos, sin), rotated(k, cos, sin)


def rotated(x: Tensor, *angles: Tensor) -> Tensor:
    out = new_tensor(x.memory, x.shape, x.dtype, "rotated", heads_inside(x.shape))
    if recording(x):
        out.node = Node(x.memory, _rotated_backward, (x,), angles)
    return out


def _rotated_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _angles = node.unpack()
    grad = grads[0]
    return [new_tensor(grad.memory, grad.shape, grad.dtype, "rotated gradient", heads_inside(grad.shape))]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
    """Run FusedAttnFunc without a mask, with grouped k and v. It saves q, k, v, the output and one fp32 logsumexp per
    query and head."""
    return te_fused_attention(q, k, v), None


def te_fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return contiguous(transpose(scaled_dot_product_attention(q, k, v, None), 1, 2))


def te_flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run FlashAttention (dot_product_attention/backends.py). Its kernel takes the batch first, Megatron has the
    sequence first.

    So q, k and v are copied, and the copies saved. The output is copied too, while the kernel has saved the original.
    With one sequence both orders are the same.
    """
    if q.shape[0].size == 1:
        return te_fused_attention(q, k, v)
    return clone(te_fused_attention(*(batch_first(x) for x in (q, k, v))))


def batch_first(x: Tensor) -> Tensor:
    return transpose(clone(transpose(x, 1, 2)), 1, 2)


def core_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, p: float, softcap: bool = False
) -> Attended:
    """Run DotProductAttention (megatron/core/transformer/dot_product_attention.py)."""
    return dot_product_attention(q, k, v, p), None


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    key, value = blocks.repeat_kv(k, q.shape[1]), blocks.repeat_kv(v, q.shape[1])
    scores = scaled_product(q, transpose(key, 2, 3), "attention scores")  # a name of the real forward, to its end
    probabilities = dropout(masked_softmax(scores), p)
    return contiguous(transpose(product(probabilities, value, "attention output"), 1, 2))


def product(a: Tensor, b: Tensor, name: str) -> Tensor:
    """Compute a batched product that reads its factors in place. It saves both and copies neither."""
    return _product(a, b, name, _product_backward)


def _product(a: Tensor, b: Tensor, name: str, backward: Callable[[Node, list[Tensor]], list[Tensor]]) -> Tensor:
    node = Node(a.memory, backward, (a, b), (a, b), name) if recording(a, b) else None
    works(a.memory, name, (*a.shape, b.shape[3]), a.dtype)
    out = new_tensor(a.memory, (*a.shape[:3], b.shape[3]), a.dtype, name)
    out.node = node
    return out


def _product_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    a, b = node.unpack()
    works_backward(node, node.context, (*a.shape, b.shape[3]), a.dtype)
    grad_b = _gradient_of(b)
    return [_gradient_of(a), grad_b]


def scaled_product(a: Tensor, b: Tensor, name: str) -> Tensor:
    """Compute `torch.baddbmm` with a scale. Each factor's gradient is multiplied by the scale."""
    return _product(a, b, name, _scaled_product_backward)


def _scaled_product_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    a, b = node.unpack()
    works_backward(node, node.context, (*a.shape, b.shape[3]), a.dtype)
    unscaled = _gradient_of(a)
    grad_a = _gradient_of(a)
    del unscaled
    _unscaled = _gradient_of(b)
    grad_b = _gradient_of(b)
    return [grad_a, grad_b]


def _gradient_of(factor: Tensor) -> Tensor:
    """Allocate a factor's gradient: by token for queries, keys and values, as the views that lead to them need it."""
    if factor.strides[2] == 1 != factor.strides[3]:
        return transpose(_gradient_of(transpose(factor, 2, 3)), 2, 3)
    strides = heads_inside(factor.shape) if factor.strides[1] < factor.strides[2] else None
    return new_tensor(factor.memory, factor.shape, factor.dtype, "attention gradient", strides)


def masked_softmax(scores: Tensor) -> Tensor:
    """Run ScaledUpperTriangMaskedSoftmax. It saves its result in 16 bits; backward writes over the incoming
    gradient."""
    out = new_tensor(scores.memory, scores.shape, scores.dtype, "softmax")
    if recording(scores):
        out.node = Node(out.memory, _masked_softmax_backward, (scores,), (alias(out),))
    return out


def _masked_softmax_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _result = node.unpack()
    return [alias(packed(grads[0]))]


def core_attention_recomputed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, p: float, softcap: bool = False
) -> Attended:
    """Run core attention with selective recomputation (--recompute-activations): q, k and v are kept, the rest is run
    again."""
    return checkpoint(q.memory, dot_product_attention, q, k, v, p, early_stop=False), None


def fused_attention_recomputed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
    """Run the fused kernel with selective recomputation: only q, k and v are kept, not the kernel's output and
    logsumexp."""
    return checkpoint(q.memory, te_fused_attention, q, k, v, early_stop=False), None


def no_mask(run: Run, window: int | None = None) -> None:
    """Return no mask: the kernels know that attention is causal, and its window."""


# --- the loss


def vocab_parallel_cross_entropy(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    """Run tensor_parallel/cross_entropy.py on one rank: an fp32 copy of the logits becomes the softmax and its
    gradient."""
    return mean_loss(run, token_losses(run, logits, labels))


def token_losses(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy(logits, _targets(run, labels))


def _targets(run: Run, labels: Tensor) -> Tensor:
    run.memory.scope = "loss"
    return contiguous(transpose(labels, 0, 1))


def mean_loss(run: Run, losses: Tensor) -> Tensor:
    """Run the loss function of pretrain_gpt.py: the sum of the tokens' losses times a mask from the batch."""
    mask = new_tensor(run.memory, losses.shape, fp32, "loss mask")
    weighted = losses * mask
    loss = new_tensor(run.memory, (), fp32, "loss")
    if recording(weighted):
        loss.node = Node(run.memory, sum_backward, (weighted,), (), weighted.shape)
    return loss


def sum_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [Tensor(grads[0].storage, node.context, (0,) * len(node.context), grads[0].dtype)]


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    memory, tokens = logits.memory, merge(*logits.shape[:-1])

    def each_token(dtype: DType, name: str) -> Tensor:
        return new_tensor(memory, (tokens,), dtype, name)

    softmax = logits if logits.dtype is fp32 else new_tensor(memory, logits.shape, fp32, "softmax")
    maximum, places = each_token(fp32, "maximum"), each_token(int64, "place of the maximum")
    del places
    masks_of_bounds = [each_token(boolean, "outside the vocabulary") for _ in ("below", "above")]
    outside = each_token(boolean, "outside the vocabulary")
    del masks_of_bounds
    copied = each_token(int64, "targets")
    target_1d = each_token(int64, "targets")
    del copied
    rows = each_token(int64, "rows")
    predicted = each_token(fp32, "logits of the targets")
    predicted = each_token(fp32, "logits of the targets")
    sums = each_token(fp32, "sums")
    del rows
    logarithms = each_token(fp32, "logarithms of the sums")
    losses = each_token(fp32, "loss of each token")
    del logarithms, sums, predicted, maximum
    if recording(logits):
        losses.node = Node(memory, cross_entropy_backward, (logits,), (alias(softmax), outside, target_1d))
    return losses


def compiled_cross_entropy(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    """Run core/fusions/fused_cross_entropy.py on one rank: the functions of the loss, each compiled by `jit_fuser`.

    A compiled function writes its results to tensors of their own. So the exponentials lie beside the fp32 copy of the logits,
    and the gradient is written in 16 bits beside the softmax.
    """
    return mean_loss(run, compiled_token_losses(run, logits, labels))


def compiled_token_losses(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    return _compiled_cross_entropy(logits, _targets(run, labels))


def _compiled_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    memory, tokens = logits.memory, merge(*logits.shape[:-1])

    def each_token(dtype: DType, name: str) -> Tensor:
        return new_tensor(memory, (tokens,), dtype, name)

    in_fp32 = new_tensor(memory, logits.shape, fp32, "logits in fp32")
    maximum = each_token(fp32, "maximum")
    outside, target_1d = each_token(boolean, "outside the vocabulary"), each_token(int64, "targets")
    both = new_tensor(memory, (Dim("2", 2), tokens), fp32, "logits of the targets and sums")
    softmax = like(in_fp32, "softmax")
    losses = each_token(fp32, "loss of each token")
    del both, maximum, in_fp32
    if recording(logits):
        losses.node = Node(memory, _compiled_backward, (logits,), (alias(softmax), outside, target_1d), logits.dtype)
    return losses


def _compiled_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    softmax, _outside, _target_1d = node.unpack()
    return [like(softmax, "gradient of the logits", node.context)]


def cross_entropy_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    softmax, outside, target_1d = node.unpack()
    _rows = like(target_1d, "rows")
    inside = like(outside, "inside the vocabulary", fp32)
    _updates = like(inside, "updates")
    del inside
    _of_targets = like(outside, "softmax of the targets", fp32)
    return [alias(softmax)]


def fused_cross_entropy(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    """Run CrossEntropyFunction (transformer_engine/pytorch/cross_entropy.py). The gradient is written over the
    logits."""
    return mean_loss(run, fused_token_losses(run, logits, labels))


def fused_token_losses(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    return _fused_cross_entropy(logits, _targets(run, labels))


def _fused_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    tokens = merge(*logits.shape[:-1])
    losses = new_tensor(logits.memory, (tokens,), fp32, "loss of each token")
    statistics = new_tensor(logits.memory, (tokens, Dim("3", 3)), fp32, "softmax statistics")
    del statistics
    if recording(logits):
        losses.node = Node(logits.memory, _fused_cross_entropy_backward, (logits,), (alias(logits),))
    return losses


def _fused_cross_entropy_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _one = new_tensor(node.memory, (), fp32, "one")  # compared with the incoming gradient
    return [alias(grad) for grad in node.unpack()]


# --- the functions of transformers' programs that Megatron's kernels replace

REPLACED: Final[Replacements] = {
    blocks.rms_norm: rms_norm,
    norm.layer_norm: layer_norm,
    blocks.act: act,
    blocks.gated: gated,
    blocks.apply_rotary_pos_emb: apply_rotary_pos_emb,
    blocks.eager_attention: core_attention,
    gpt2.eager_attention: core_attention,
    blocks.sdpa_attention: fused_attention,
    masks.causal_mask: no_mask,
}
SELECTIVE: Final[Replacements] = {
    blocks.eager_attention: core_attention_recomputed,
    gpt2.eager_attention: core_attention_recomputed,
    blocks.sdpa_attention: fused_attention_recomputed,
}
"""The functions that replace attention with --recompute selective."""

LOSSES: Final[Mapping[str, Replacements]] = {
    "vocab-parallel": {blocks.causal_lm_loss: vocab_parallel_cross_entropy},
    "vocab-parallel-fused": {blocks.causal_lm_loss: compiled_cross_entropy},
    "fused": {blocks.causal_lm_loss: fused_cross_entropy},
}
TOKEN_LOSSES: Final[Mapping[str, Callable[[Run, Tensor, Tensor], Tensor]]] = {
    "vocab-parallel": token_losses,
    "vocab-parallel-fused": compiled_token_losses,
    "fused": fused_token_losses,
}
"""The losses of all tokens, before their mean."""
