"""Blocks that several families use, each written as in transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import Dim, divided, merge, plus
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.attention import scaled_dot_product_attention
from memcalc.core.ops.axes import narrow
from memcalc.core.ops.elementwise import (
    activation,
    cast,
    dropout,
    erf,
    like,
    mean,
    mul,
    power,
    rsqrt,
    scale,
    sigmoid,
    softmax,
    tanh,
)
from memcalc.core.ops.loss import cross_entropy
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.replaceable import replaceable
from memcalc.core.ops.shape import (
    cat,
    contiguous,
    expand,
    reshape,
    rotate_half,
    transpose,
    unsqueeze,
    view,
)
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import Buffer, Module, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memcalc.core.dtypes import DType

Attended = tuple[Tensor, Tensor | None]
"""The results of an attention: its output and, when eager, the weights, which the caller's frame keeps alive."""

QKV = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, (batch, heads, seq, head_dim) each."""

Rotary = tuple[Tensor, Tensor]
"""cos and sin, (1, seq, rotary dim)."""


@replaceable
def rms_norm(m: Module, hidden_states: Tensor) -> Tensor:
    """Run LlamaRMSNorm (models/llama/modeling_llama.py): seven primitive ops."""
    with m:
        input_dtype = hidden_states.dtype
        hidden_states = cast(hidden_states, fp32)
        variance = mean(power(hidden_states, 2))
        hidden_states = hidden_states * rsqrt(variance + 1e-6)
        return m.weight() * cast(hidden_states, input_dtype)


def rms_norm_in_fp32(m: Module, hidden_states: Tensor) -> Tensor:
    """Run Olmo2RMSNorm (models/olmo2/modeling_olmo2.py): the weight is multiplied before the cast back."""
    with m:
        input_dtype = hidden_states.dtype
        hidden_states = cast(hidden_states, fp32)
        variance = mean(power(hidden_states, 2))
        hidden_states = hidden_states * rsqrt(variance + 1e-6)
        return cast(m.weight() * hidden_states, input_dtype)


def softcap(x: Tensor) -> Tensor:
    """Compute `tanh(x / cap) * cap`, each result under the same name."""
    x = scale(x, "div")
    x = tanh(x)
    return scale(x, "mul")


ONE_KERNEL = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu6": "hardtanh",
    "leaky_relu": "leaky_relu",
    "hardswish": "hardswish",
    "mish": "mish",
}


@replaceable
def act(x: Tensor, name: str) -> Tensor:
    """Run an activation by its name in transformers' ACT2FN (activations.py)."""
    visitor = x.memory.visitor
    if visitor is None:
        return activation(x, ONE_KERNEL[name]) if name in ONE_KERNEL else COMPOSED[name](x)
    visited = visitor.enter("act_fn", None)
    out = activation(x, ONE_KERNEL[name]) if name in ONE_KERNEL else COMPOSED[name](x)
    if visited:
        visitor.leave(done=True)
    return out


def linear_activation(x: Tensor) -> Tensor:
    """Run LinearActivation: return x unchanged."""
    return x


def relu2(x: Tensor) -> Tensor:
    """Run ReLUSquaredActivation: square(relu(x))."""
    relu_applied = activation(x, "relu")
    return power(relu_applied, 2)


def quick_gelu(x: Tensor) -> Tensor:
    """Run QuickGELUActivation: x * sigmoid(1.702 * x)."""
    return x * sigmoid(1.702 * x)


def gelu_python(x: Tensor) -> Tensor:
    """Run GELUActivation._gelu_python: x * 0.5 * (1 + erf(x / sqrt(2)))."""
    return (x * 0.5) * (1.0 + erf(x / 1.41421))


def gelu_new(x: Tensor) -> Tensor:
    """Run NewGELUActivation: 0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x**3))), op by op."""
    return (0.5 * x) * (1.0 + tanh(0.79788 * (x + 0.044715 * power(x, 3))))


def gelu_fast(x: Tensor) -> Tensor:
    """Run FastGELUActivation: 0.5 * x * (1 + tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))), op by op."""
    return (0.5 * x) * (1.0 + tanh((x * 0.79788) * (1.0 + (0.044715 * x) * x)))


COMPOSED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_accurate": gelu_new,
    "gelu_fast": gelu_fast,
    "gelu_new": gelu_new,
    "gelu_python": gelu_python,
    "gelu_python_tanh": gelu_new,
    "linear": linear_activation,
    "quick_gelu": quick_gelu,
    "relu2": relu2,
    "sigmoid": sigmoid,
    "tanh": tanh,
}


@replaceable
def gated(gate: Module, up: Module, x: Tensor, name: str) -> Tensor:
    """Compute `act(gate(x)) * up(x)` in LlamaMLP's order."""
    return act(gate.linear(x), name) * up.linear(x)


@replaceable
def gated_halves(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Compute `up * act(gate)` of the two halves of one projection (Phi3MLP)."""
    return up * act(gate, name)


def position_ids(run: Run) -> Tensor:
    """Compute `arange(seq) + past_seen_tokens` with a batch dim of 1, or return the caller's positions."""
    if run.positions is not None:
        return run.positions
    ids = new_tensor(run.memory, (run.seq,), int64, "position ids")
    return unsqueeze(like(ids, "position ids"), 0)


def rotary_embedding(
    m: Module, positions: Tensor, width: Dim, kind: str, *, prefix: str = "", dtype: DType | None = None
) -> Rotary:
    """Run LlamaRotaryEmbedding: cos and sin in the model's dtype, or in `dtype`, without gradients.

    `prefix` begins the names of the frequencies if there is a set for each kind of layer.
    """
    run = m.run
    run.memory.scope = m.path
    visited = run.memory.visitor is not None and run.memory.visitor.enter(m.path, m.layer)
    grad_enabled, run.memory.grad_enabled = run.memory.grad_enabled, False
    freqs = rotary_angles(m, positions, kind, prefix)
    emb = cat((freqs, freqs), width)
    cos = scale(like(emb, "cos"), "mul", "cos")
    sin = scale(like(emb, "sin"), "mul", "sin")
    dtype = dtype or run.dtype
    cos, sin = cast(cos, dtype, "cos"), cast(sin, dtype, "sin")
    run.memory.grad_enabled = grad_enabled
    if visited and run.memory.visitor is not None:
        run.memory.visitor.leave(done=True)
    return cos, sin


def rotary_angles(m: Module, positions: Tensor, kind: str, prefix: str = "") -> Tensor:
    """Compute `position_ids * inv_freq` in fp32."""
    frequency_update(m, kind, prefix)
    inv_freq = m.buffer(f"{prefix}inv_freq")
    return mul(cast(unsqueeze(positions, 2), fp32), cast(inv_freq, fp32))


def rotary_buffers(path: str, width: Dim, kind: str, longest: int | None, *, prefix: str = "") -> Iterator[Buffer]:
    """Yield the frequencies that LlamaRotaryEmbedding keeps. Dynamic ones are made for sequences of up to `longest`
    tokens. longrope's long set is a plain attribute that the first forward makes in fp32 (modeling_rope_utils.py)."""
    half = divided(width, 2)
    yield Buffer(f"{path}.{prefix}inv_freq", (half,), longest=longest if kind == "dynamic" else None)
    yield Buffer(f"{path}.{prefix}original_inv_freq", (half,))
    if kind == "longrope":
        yield Buffer(f"{path}.{prefix}long_inv_freq", (half,), fp32, registered=False)


def frequency_update(m: Module, kind: str, prefix: str = "") -> None:
    """Run dynamic_rope_update (modeling_rope_utils.py), before the angles are made."""
    if kind == "longrope":
        _longrope_frequency_update(m, prefix)
    elif kind == "dynamic":
        _dynamic_frequency_update(m.run)


def _dynamic_frequency_update(run: Run) -> None:
    """Compare the sequence length with the lengths that have frequencies."""
    last = new_tensor(run.memory, (), int64, "last position")
    seq_len = like(last, "sequence length")
    del last
    for compared in ("longer", "shorter"):
        like(seq_len, compared, boolean)


def _longrope_frequency_update(m: Module, prefix: str) -> None:
    """Pick the long or the short set, then copy it into `inv_freq`."""
    _picked = like(m.buffer(f"{prefix}long_inv_freq"), "picked inv_freq")


@replaceable
def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `(x * cos) + (rotate_half(x) * sin)` for q and k."""
    cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def apply_mask_to_padding_states(hidden_states: Tensor, mask: Tensor | None) -> Tensor:
    """Set padding tokens to zero by a mask of (batch, seq) (models/mamba/modeling_mamba.py)."""
    if mask is None:
        return hidden_states
    return cast(hidden_states * unsqueeze(mask, 2), hidden_states.dtype)


def repeat_kv(x: Tensor, heads: Dim) -> Tensor:
    """Repeat (batch, kv_heads, seq, head_dim) to (batch, heads, seq, head_dim): a copy unless nothing is repeated."""
    batch, kv_heads, seq, width = x.shape
    if heads.size == kv_heads.size:
        return x
    groups = Dim("heads/kv_heads", heads.size // kv_heads.size)
    return reshape(expand(unsqueeze(x, 2), batch, kv_heads, groups, seq, width), batch, heads, seq, width)


def pack_gqa(q: Tensor, kv_heads: Dim) -> Tensor:
    """Return one token's q, (batch, heads, 1, head_dim), as (batch, kv_heads, heads/kv_heads, head_dim): a view."""
    batch, heads, _, width = q.shape
    return reshape(q, batch, kv_heads, Dim("heads/kv_heads", heads.size // kv_heads.size), width)


@replaceable
def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, p: float, softcap: bool = False
) -> Attended:
    """Run eager_attention_forward of Llama and most others: (batch, seq, heads, head_dim), contiguous, and the
    weights."""
    key_states = repeat_kv(k, q.shape[1])
    value_states = repeat_kv(v, q.shape[1])
    attn_weights = scale(matmul(q, transpose(key_states, 2, 3), "attention scores"), "mul")
    if softcap:
        attn_weights = scale(attn_weights, "div")
        attn_weights = tanh(attn_weights)
        attn_weights = scale(attn_weights, "mul")
    if mask is not None:
        attn_weights = attn_weights + mask
    attn_weights = cast(softmax(attn_weights, fp32), q.dtype)
    attn_weights = dropout(attn_weights, p)
    attn_output = matmul(attn_weights, value_states, "attention output")
    attn_output = contiguous(transpose(attn_output, 1, 2))
    return attn_output, attn_weights


def plain_eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, p: float) -> Attended:
    """Run eager_attention_forward of BERT (models/bert/modeling_bert.py) and its kin: softmax in the model's dtype."""
    attn_weights = scale(matmul(q, transpose(k, 2, 3), "attention scores"), "mul")
    if mask is not None:
        attn_weights = attn_weights + mask
    attn_weights = softmax(attn_weights)
    attn_weights = dropout(attn_weights, p)
    attn_output = matmul(attn_weights, v, "attention output")
    attn_output = contiguous(transpose(attn_output, 1, 2))
    return attn_output, attn_weights


@replaceable
def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
    """Run sdpa_attention_forward (integrations/sdpa_attention.py) of a causal module (`is_causal`)."""
    return _sdpa_attention(q, k, v, mask, True)


def bidirectional_sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
    """Run sdpa_attention_forward (integrations/sdpa_attention.py) of a module that is not causal."""
    return _sdpa_attention(q, k, v, mask, False)


def _sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Attended:
    """Run sdpa_attention_forward. Dropout happens inside the fused kernel.

    With a mask or wide heads the kernel takes no grouped k and v. They are repeated, or for a single token q is
    grouped.
    """
    grouped = q.shape[1].size != k.shape[1].size
    if not grouped or (mask is None and k.shape[3].size == v.shape[3].size <= 256):
        k, v = (_written(x, q, mask, causal=causal) for x in (k, v))
        attn_output = scaled_dot_product_attention(q, k, v, mask, causal and q.shape[2].size > 1)
    elif q.shape[2].size == 1:
        packed = scaled_dot_product_attention(pack_gqa(q, k.shape[1]), k, v, mask, False)
        attn_output = reshape(packed, *q.shape[:3], v.shape[3])
    else:
        k = repeat_kv(k, q.shape[1])
        v = repeat_kv(v, q.shape[1])
        k, v = (_written(x, q, mask, causal=causal) for x in (k, v))
        attn_output = scaled_dot_product_attention(q, k, v, mask, causal)
    return contiguous(transpose(attn_output, 1, 2)), None


def _written(x: Tensor, q: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Return the keys or values without the places of a static cache that are still empty when a prompt fills it: a view."""
    tokens = q.shape[2]
    return narrow(x, 2, tokens) if causal and mask is None and 1 < tokens.size < x.shape[2].size else x


def attention(run: Run, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, p: float = 0.0) -> Attended:
    """Run the attention interface: q, k, v (batch, heads, seq, head_dim) -> (batch, seq, heads, head_dim),
    contiguous."""
    return eager_attention(q, k, v, mask, p=p) if run.attention == "eager" else sdpa_attention(q, k, v, mask)


def masked_lm_loss(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    """Run ForMaskedLMLoss (loss/loss_utils.py): upcast, cross-entropy."""
    run.memory.scope = "loss"
    logits = cast(logits, fp32)
    return loss_of_logits(run, logits, labels)


def loss_of_logits(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    """Compute `CrossEntropyLoss()(logits.view(-1, vocab), labels.view(-1))`."""
    run.memory.scope = "loss"
    logits = view(logits, merge(*logits.shape[:-1]), logits.shape[-1])
    return cross_entropy(logits, view(labels, merge(*labels.shape)))


@replaceable
def lm_head_loss(head: Module, logits: Callable[[Tensor], Tensor], hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the logits that `logits` computes from the last hidden states with the weight of `head`.

    Kernels that join the head and the loss never have the logits: they take the weight.
    """
    output = logits(hidden_states)
    return causal_lm_loss(head.run, output, labels)


@replaceable
def own_head_loss(head: Module, logits: Callable[[Tensor], Tensor], hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of a model whose head no kernel joins with its loss."""
    output = logits(hidden_states)
    return causal_lm_loss(head.run, output, labels)


@replaceable
def causal_lm_loss(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    """Run ForCausalLMLoss (loss/loss_utils.py): upcast, shift by padding, cross-entropy."""
    run.memory.scope = "loss"
    if run.shift_labels is not None:
        run.logits = logits
    logits = cast(logits, fp32)
    _padded, shift_labels = shifted_labels(run, labels)
    logits = view(logits, merge(*logits.shape[:-1]), logits.shape[-1])
    return cross_entropy(logits, shift_labels)


def shifted_labels(run: Run, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels padded by one, which the loss's frame holds, and the next token of each token, flattened."""
    if run.shift_labels is not None:
        return run.shift_labels, view(run.shift_labels, merge(*run.shift_labels.shape))
    padded = new_tensor(run.memory, (labels.shape[0], plus(run.seq, 1)), int64, "padded labels")
    shifted = Tensor(padded.storage, labels.shape, padded.strides, int64)
    return padded, view(contiguous(shifted), merge(*labels.shape))
