"""Blocks that families share, each written as transformers writes it."""

from __future__ import annotations

from memcalc.dims import ONE_DIM, Dim, merge, plus
from memcalc.dtypes import boolean, fp32, int64
from memcalc.families.module import Module, Run
from memcalc.ops.attention import scaled_dot_product_attention
from memcalc.ops.elementwise import activation, add, cast, dropout, like, mean, mul, of_two, power, rsqrt, scale, softmax, tanh
from memcalc.ops.loss import cross_entropy
from memcalc.ops.matmul import matmul
from memcalc.ops.shape import cat, clone, contiguous, expand, reshape, rotate_half, transpose, unsqueeze, view
from memcalc.tensor import Tensor, new_tensor


Attended = tuple[Tensor, Tensor | None]
"""What an attention returns: its output and, when eager, the weights, which the caller's frame keeps alive."""


def rms_norm(m: Module, hidden_states: Tensor) -> Tensor:
    """LlamaRMSNorm (models/llama/modeling_llama.py): seven primitive ops."""
    m.run.memory.scope = m.path
    input_dtype = hidden_states.dtype
    hidden_states = cast(hidden_states, fp32)
    variance = mean(power(hidden_states, 2))
    hidden_states = hidden_states * rsqrt(variance + 1e-6)
    return m.weight() * cast(hidden_states, input_dtype)


ONE_KERNEL = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
ACTIVATIONS = (*ONE_KERNEL, "gelu_new", "gelu_fast", "tanh", "linear")


def act(x: Tensor, name: str) -> Tensor:
    """An activation of transformers' ACT2FN by its name there."""
    if name in ONE_KERNEL:
        return activation(x, ONE_KERNEL[name])
    if name == "tanh":
        return tanh(x)
    if name == "linear":
        return x
    return gelu_new(x) if name == "gelu_new" else gelu_fast(x)


def gelu_new(x: Tensor) -> Tensor:
    """NewGELUActivation: 0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x**3))), op by op."""
    return (0.5 * x) * (1.0 + tanh(0.79788 * (x + 0.044715 * power(x, 3))))


def gelu_fast(x: Tensor) -> Tensor:
    """FastGELUActivation: 0.5 * x * (1 + tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))), op by op."""
    return (0.5 * x) * (1.0 + tanh((x * 0.79788) * (1.0 + (0.044715 * x) * x)))


def position_ids(run: Run) -> Tensor:
    """arange(seq) + past_seen_tokens, with a batch dim of 1."""
    ids = new_tensor(run.memory, (run.seq,), int64, "position ids")
    return unsqueeze(like(ids, "position ids"), 0)


def rotary_embedding(run: Run, inv_freq: Tensor, positions: Tensor, width: Dim) -> tuple[Tensor, Tensor]:
    """LlamaRotaryEmbedding: cos and sin of (1, seq, rotary dim) in the model's dtype; no gradient."""
    run.memory.scope = "model.rotary_emb"
    grad_enabled, run.memory.grad_enabled = run.memory.grad_enabled, False
    freqs = mul(cast(unsqueeze(positions, 2), fp32), cast(inv_freq, fp32))
    emb = cat((freqs, freqs), width)
    cos = scale(like(emb, "cos"), "mul")
    sin = scale(like(emb, "sin"), "mul")
    cos, sin = cast(cos, run.dtype), cast(sin, run.dtype)
    run.memory.grad_enabled = grad_enabled
    return cos, sin


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(x * cos) + (rotate_half(x) * sin) for q and k."""
    cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def repeat_kv(x: Tensor, heads: Dim) -> Tensor:
    """(batch, kv_heads, seq, head_dim) -> (batch, heads, seq, head_dim); a copy unless nothing is repeated."""
    batch, kv_heads, seq, width = x.shape
    if heads.size == kv_heads.size:
        return x
    groups = Dim("heads/kv_heads", heads.size // kv_heads.size)
    return reshape(expand(unsqueeze(x, 2), batch, kv_heads, groups, seq, width), batch, heads, seq, width)


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, softcap: bool = False, p: float = 0.0, upcast: bool = True
) -> tuple[Tensor, Tensor]:
    """eager_attention_forward, up to the product with v (batch, heads, seq, head_dim), and the attention weights."""
    key_states = repeat_kv(k, q.shape[1])
    value_states = repeat_kv(v, q.shape[1])
    attn_weights = scale(matmul(q, transpose(key_states, 2, 3), "attention scores"), "mul")
    if softcap:
        attn_weights = scale(attn_weights, "div")
        attn_weights = tanh(attn_weights)
        attn_weights = scale(attn_weights, "mul")
    if mask is not None:
        attn_weights = attn_weights + mask
    attn_weights = cast(softmax(attn_weights, fp32 if upcast else None), q.dtype)
    attn_weights = dropout(attn_weights, p)
    return matmul(attn_weights, value_states, "attention output"), attn_weights


def attention(
    run: Run, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, softcap: bool = False, p: float = 0.0
) -> Attended:
    """The attention interface: q, k, v (batch, heads, seq, head_dim) -> (batch, seq, heads, head_dim), contiguous."""
    if run.attention == "eager":
        attn_output, attn_weights = eager_attention(q, k, v, mask, softcap=softcap, p=p)
        return contiguous(transpose(attn_output, 1, 2)), attn_weights
    if mask is not None or k.shape[3].size > 256:
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    attn_output = scaled_dot_product_attention(q, k, v, mask)
    return contiguous(transpose(attn_output, 1, 2)), None


def causal_mask(run: Run, window: int | None = None) -> Tensor | None:
    """create_causal_mask / create_sliding_window_causal_mask (masking_utils.py): None where sdpa needs none."""
    if run.attention != "eager" and (window is None or run.seq.size < window):
        return None
    memory, batch, seq = run.memory, run.batch, run.seq
    memory.scope = "causal mask"
    q_arange = new_tensor(memory, (seq,), int64, "query positions")
    kv_arange = new_tensor(memory, (seq,), int64, "key positions")
    shape = (ONE_DIM, ONE_DIM, seq, seq)
    mask = new_tensor(memory, shape, boolean, "causal mask")
    if window is not None:
        mask = _within_window(mask, q_arange, kv_arange, window)
    mask = expand(mask, batch, ONE_DIM, seq, seq)
    if run.attention == "eager":
        mask = new_tensor(memory, mask.shape, run.dtype, "additive mask")
    return mask


def _within_window(mask: Tensor, q_arange: Tensor, kv_arange: Tensor, window: int) -> Tensor:
    inside = new_tensor(mask.memory, mask.shape, boolean, "sliding window")
    return of_two(inside, mask, "and")


def causal_lm_loss(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    """ForCausalLMLoss (loss/loss_utils.py): upcast, shift by padding, cross-entropy."""
    run.memory.scope = "loss"
    logits = cast(logits, fp32)
    padded = new_tensor(run.memory, (labels.shape[0], plus(run.seq, 1)), int64, "padded labels")
    shifted = Tensor(padded.storage, labels.shape, padded.strides, int64)
    shift_labels = contiguous(shifted)
    logits = view(logits, merge(*logits.shape[:-1]), logits.shape[-1])
    shift_labels = view(shift_labels, merge(*labels.shape))
    return cross_entropy(logits, shift_labels)


