"""Liger-Kernel 0.8.5 (src/liger_kernel), as `apply_liger_kernel_to_*` puts it into transformers' models on an NVIDIA
GPU of compute capability 8.0 or newer.

The backwards write over existing tensors where they can: the gated unit over its saved inputs, rotary positions over q
and k, the norm over its incoming gradient. The fused loss computes both gradients in forward, chunk by chunk, and never
has all logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.shape import view
from memcalc.core.ops.work import works
from memcalc.core.tensor import Tensor, is_contiguous, new_tensor
from memcalc.families import phi3
from memcalc.families.base import blocks
from memcalc.families.gemma import gemma_rms_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memcalc.core.ops.replaceable import Replacements
    from memcalc.families.base.module import Module

MULTIPROCESSORS: Final = 132
"""The rows of the partial weight gradients that a norm's backward adds up, one per multiprocessor: 132 on H100 and
H200."""

LARGEST: Final = 65536
"""The widest row that a kernel takes (ops/utils.py, calculate_settings)."""


def packed(t: Tensor) -> Tensor:
    """Compute `t.contiguous()` inside an autograd.Function, where no graph is recorded."""
    return t if is_contiguous(t) else new_tensor(t.memory, t.shape, t.dtype, "contiguous copy")


def alias(t: Tensor) -> Tensor:
    """Return a tensor over the same bytes without a grad_fn, as an in-place backward does."""
    return Tensor(t.storage, t.shape, t.strides, t.dtype)


# --- norms (ops/rms_norm.py)


def rms_norm(m: Module, hidden_states: Tensor) -> Tensor:
    """Run LigerRMSNorm. It saves its input and an fp32 rstd per row, whether the weight trains or not; the input's
    gradient is written over the output's."""
    with m:
        return _rms_norm(hidden_states, m.weight(), in_place=True)


def rms_norm_kept(m: Module, hidden_states: Tensor) -> Tensor:
    """Run LigerRMSNorm with in_place=False, for a norm whose output's gradient a residual needs too."""
    with m:
        return _rms_norm(hidden_states, m.weight(), in_place=False)


def _rms_norm(x: Tensor, weight: Tensor, *, in_place: bool) -> Tensor:
    x = packed(x)
    out = new_tensor(x.memory, x.shape, x.dtype, "RMS norm")
    rstd = new_tensor(x.memory, x.shape[:-1], fp32, "RMS norm rstd")
    if recording(x, weight):
        out.node = Node(x.memory, _rms_norm_backward, (x, weight), (x, weight, rstd), in_place)
    return out


def _rms_norm_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    x, weight, _rstd = node.unpack()
    grad = packed(grads[0])
    if not node.needs(1):
        return [grad if node.context else like(grad, "RMS norm gradient")]
    rows = Dim("multiprocessors", MULTIPROCESSORS)
    _partial = new_tensor(x.memory, (rows, weight.shape[0]), fp32, "partial weight gradients")
    grad_x = grad if node.context else like(grad, "RMS norm gradient")
    summed = new_tensor(x.memory, weight.shape, fp32, "RMS norm weight gradient")
    if weight.dtype is fp32:
        return [grad_x, summed]
    return [grad_x, new_tensor(x.memory, weight.shape, weight.dtype, "RMS norm weight gradient")]


# --- gated units (ops/swiglu.py, ops/geglu.py)


def gated(gate: Module, up: Module, x: Tensor, name: str) -> Tensor:
    """Run LigerSwiGLUMLP or LigerGEGLUMLP: both projections, then one kernel."""
    return gated_halves(gate.linear(x), up.linear(x), name)


def gated_halves(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Run LigerSiLUMulFunction or LigerGELUMulFunction. It saves gate and up; backward writes their gradients over
    them."""
    kept = packed(gate), packed(up)
    out = new_tensor(gate.memory, gate.shape, gate.dtype, "gated")
    if recording(gate, up):
        out.node = Node(gate.memory, _gated_backward, (gate, up), kept)
    return out


def _gated_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _grad = packed(grads[0])
    gate, up = node.unpack()
    return [alias(gate), alias(up)]


# --- rotary positions (ops/rope.py)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Run LigerRopeFunction. It rotates q and k in place, packed by token, and saves cos and sin."""
    q_rows, k_rows = _by_token(q), _by_token(k)
    node = Node(q.memory, _rope_backward, (q, k), (cos, sin), outputs=2) if recording(q, k) else None
    return _by_head(q_rows, node, 0), _by_head(k_rows, node, 1)


def _rope_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _cos, _sin = node.unpack()
    q_rows, k_rows = [_by_token(grad) for grad in grads]
    return [_by_head(q_rows), _by_head(k_rows)]


def _by_token(x: Tensor) -> Tensor:
    """Return (batch, heads, seq, width) as (batch, seq, heads, width), contiguous."""
    shape, strides = _swapped(x)
    return packed(Tensor(x.storage, shape, strides, x.dtype))


def _by_head(rows: Tensor, node: Node | None = None, output: int = 0) -> Tensor:
    return Tensor(rows.storage, *_swapped(rows), rows.dtype, node, output)


def _swapped(x: Tensor) -> tuple[Any, Any]:
    (a, b, c, d), (p, q, r, s) = x.shape, x.strides
    return (a, c, b, d), (p, r, q, s)


# --- the loss (ops/fused_linear_cross_entropy.py)


def loss_chunk(tokens: int, vocab: int, hidden: int) -> int:
    """Return the number of tokens whose logits exist at a time. They have about as many bytes as the hidden states,
    rounded to a power of two."""
    share = -(-tokens // -(-vocab // hidden))
    return min(1 << (share - 1).bit_length(), tokens)


def lm_head_loss(head: Module, logits: Callable[[Tensor], Tensor], hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Run LigerForCausalLMLoss: LigerFusedLinearCrossEntropyFunction over the hidden states and the head's weight."""
    memory = head.memory
    memory.scope = "loss"
    _padded, target = blocks.shifted_labels(head.run, labels)
    x = view(hidden_states, merge(*hidden_states.shape[:-1]), hidden_states.shape[-1])
    return _linear_cross_entropy(x, head.weight(), target)


def _linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    memory, (tokens, hidden), vocab = x.memory, x.shape, weight.shape[0]
    grad_x = new_tensor(memory, x.shape, x.dtype, "gradient of the hidden states")
    saved = [grad_x]
    if weight.node is not None:
        saved.append(new_tensor(memory, weight.shape, weight.dtype, f"{weight.name} gradient"))
    _losses = new_tensor(memory, (tokens,), fp32, "loss of each token")
    _counted = new_tensor(memory, (tokens,), boolean, "tokens that count")
    count = new_tensor(memory, (), int64, "how many count")
    del count
    chunk = Dim("loss_chunk", loss_chunk(tokens.size, vocab.size, hidden.size))
    logits = new_tensor(memory, (chunk, vocab), x.dtype, "logits of a chunk")
    trains = weight.node is not None
    works(memory, weight.name.removesuffix(".weight"), (tokens, hidden, vocab), x.dtype, products=2 + trains)
    if trains and x.dtype is fp32:  # 16-bit products are added to the gradient as they are computed
        product = new_tensor(memory, weight.shape, fp32, "weight gradient of a chunk")
        del product
    del logits
    loss = new_tensor(memory, (), fp32, "loss")
    if recording(x, weight):
        loss.node = Node(memory, _linear_cross_entropy_backward, (x, weight), saved)
    return loss


def _linear_cross_entropy_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    _one = new_tensor(node.memory, (), fp32, "one")  # compared with the incoming gradient
    return [*(alias(grad) for grad in node.unpack()), None][:2]


# --- the model types that Liger patches, and their replacements (transformers/monkey_patch.py)

_ROPE: Final[Replacements] = {
    blocks.apply_rotary_pos_emb: apply_rotary_pos_emb,
    phi3.apply_rotary_pos_emb: apply_rotary_pos_emb,
}

PATCHES: Final[Mapping[str, Mapping[str, Replacements]]] = {
    "llama": {
        "rope": _ROPE,
        "rms_norm": {blocks.rms_norm: rms_norm},
        "swiglu": {blocks.gated: gated, blocks.gated_halves: gated_halves},
    },
    "gemma2": {"rope": _ROPE, "rms_norm": {gemma_rms_norm: rms_norm_kept}, "geglu": {blocks.gated: gated}},
}
"""The replaced functions with Liger's, by the name in a family's record and the argument of `apply_liger_kernel_to_*`.
The losses are a separate choice (`--cross-entropy`)."""

ACTIVATIONS: Final[Mapping[str, tuple[str, ...] | None]] = {"llama": ("silu", "swish"), "gemma2": None}
"""The activations that Liger's gated unit computes. None: LigerGEGLUMLP does not check the activation and computes GELU
by tanh."""
