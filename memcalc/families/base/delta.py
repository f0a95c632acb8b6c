"""The gated delta rule (models/qwen3_next/modeling_qwen3_next.py): linear attention whose state is corrected by what it
already predicts.

This is the path in plain torch, which runs without the packages fla and causal_conv1d. The sequence is padded to whole
chunks. Within a chunk it is products and a triangular system; a Python loop runs over the chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.dtypes import boolean, fp32
from memcalc.core.ops.axes import assign_place, narrow, pad_dim, repeat_interleave, select
from memcalc.core.ops.cumulative import cumsum
from memcalc.core.ops.elementwise import cast, cast_row_major, like, mean, power, rsqrt, sigmoid, sub, sum_last
from memcalc.core.ops.exponential import exp, softplus
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.routing import masked_fill
from memcalc.core.ops.shape import cat, contiguous, reshape, split, transpose, unsqueeze, view
from memcalc.core.ops.triangular import solve_triangular
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import act, apply_mask_to_padding_states
from memcalc.families.base.module import Module, State, Weight, module
from memcalc.families.llama import linear_weights
from memcalc.families.mamba import RECURRENT, cached_conv1d

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = Dim("chunk", 64)


class GatedDeltaNet:
    """Qwen3NextGatedDeltaNet, by its sizes. It replaces attention in this family and in others."""

    def __init__(
        self,
        *,
        hidden: Dim,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        activation: str,
    ) -> None:
        self.hidden, self.activation = hidden, activation
        self.key_heads, self.value_heads = Dim("key_heads", key_heads), Dim("value_heads", value_heads)
        self.key_dim, self.value_dim = Dim("key_head_dim", key_dim), Dim("value_head_dim", value_dim)
        self.keys, self.values = merge(self.key_heads, self.key_dim), merge(self.value_heads, self.value_dim)
        self.conv_dim = Dim("2·keys+values", 2 * self.keys.size + self.values.size)
        self.kernel = Dim("conv_kernel", kernel)

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.dt_bias", (self.value_heads,), "mixer")
        yield Weight(f"{path}.A_log", (self.value_heads,), "mixer")
        yield Weight(f"{path}.conv1d.weight", (self.conv_dim, ONE_DIM, self.kernel), "mixer")
        yield from self.projection_weights(path)
        yield Weight(f"{path}.norm.weight", (self.value_dim,), "norm")
        yield from linear_weights(f"{path}.out_proj", self.values, self.hidden, "mixer", bias=False)

    def projection_weights(self, path: str) -> Iterator[Weight]:
        """Yield the parameters that project the hidden states."""
        qkvz = Dim("2·keys+2·values", 2 * self.keys.size + 2 * self.values.size)
        ba = Dim("2·value_heads", 2 * self.value_heads.size)
        yield from linear_weights(f"{path}.in_proj_qkvz", self.hidden, qkvz, "mixer", bias=False)
        yield from linear_weights(f"{path}.in_proj_ba", self.hidden, ba, "mixer", bias=False)

    def states(self) -> tuple[State, ...]:
        """Return what the module keeps from token to token."""
        return (
            State("convolution", (self.conv_dim, self.kernel)),
            State(RECURRENT, (self.value_heads, self.key_dim, self.value_dim), fp32),
        )

    @module
    def forward(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        hidden_states = apply_mask_to_padding_states(hidden_states, mask)
        batch, seq, _ = hidden_states.shape
        projected_states_qkvz = (m / "in_proj_qkvz").linear(hidden_states)
        projected_states_ba = (m / "in_proj_ba").linear(hidden_states)
        query, key, value, z, b, a = self.fix_query_key_value_ordering(projected_states_qkvz, projected_states_ba)
        parts = [reshape(x, batch, seq, width) for x, width in zip(
            (query, key, value), (self.keys, self.keys, self.values), strict=True)]  # fmt: skip
        query, key, value = parts
        del parts
        mixed_qkv = cat((query, key, value), self.conv_dim)
        mixed_qkv = transpose(mixed_qkv, 1, 2)
        mixed_qkv = cached_conv1d(m, m / "conv1d", mixed_qkv, self.activation)
        mixed_qkv = transpose(mixed_qkv, 1, 2)
        query, key, value = split(mixed_qkv, self.keys, self.keys, self.values)
        query = reshape(query, batch, seq, self.key_heads, self.key_dim)
        key = reshape(key, batch, seq, self.key_heads, self.key_dim)
        value = reshape(value, batch, seq, self.value_heads, self.value_dim)
        beta = sigmoid(b)
        g = self.decay(m, a)
        core_attn_out, _state = gated_delta_rule(m, query, key, value, g, beta)
        core_attn_out = reshape(core_attn_out, merge(batch, seq, self.value_heads), self.value_dim)
        z = reshape(z, merge(batch, seq, self.value_heads), self.value_dim)
        core_attn_out = self.norm(m / "norm", core_attn_out, z)
        core_attn_out = reshape(core_attn_out, batch, seq, self.values)
        return (m / "out_proj").linear(core_attn_out)

    def decay(self, m: Module, a: Tensor) -> Tensor:
        """Return the logarithm of the share of the state that is left after a token."""
        return -exp(cast(m.weight("A_log"), fp32)) * softplus(cast(a, fp32) + m.weight("dt_bias"))

    def fix_query_key_value_ordering(
        self, mixed_qkvz: Tensor, mixed_ba: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Split the projections, which are laid out by key head."""
        batch, seq, _ = mixed_qkvz.shape
        of_a_key = Dim("value_heads/key_heads", self.value_heads.size // self.key_heads.size)
        values = merge(of_a_key, self.value_dim)
        qkvz = Dim("2·key_head_dim+2·values", 2 * self.key_dim.size + 2 * values.size)
        ba = Dim("2·value_heads/key_heads", 2 * of_a_key.size)
        mixed_qkvz = view(mixed_qkvz, batch, seq, self.key_heads, qkvz)
        mixed_ba = view(mixed_ba, batch, seq, self.key_heads, ba)
        query, key, value, z = split(mixed_qkvz, self.key_dim, self.key_dim, values, values)
        b, a = split(mixed_ba, of_a_key, of_a_key)
        value = reshape(value, batch, seq, self.value_heads, self.value_dim)
        z = reshape(z, batch, seq, self.value_heads, self.value_dim)
        b = reshape(b, batch, seq, self.value_heads)
        a = reshape(a, batch, seq, self.value_heads)
        return query, key, value, z, b, a

    @module
    def norm(self, m: Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Run Qwen3NextRMSNormGated."""
        input_dtype = hidden_states.dtype
        hidden_states = cast(hidden_states, fp32)
        variance = mean(power(hidden_states, 2))
        hidden_states = hidden_states * rsqrt(variance + 1e-6)
        hidden_states = m.weight() * cast(hidden_states, input_dtype)
        hidden_states = hidden_states * act(cast(gate, fp32), "silu")
        return cast(hidden_states, input_dtype)


class ProjectedApart(GatedDeltaNet):
    """Qwen3_5GatedDeltaNet (models/qwen3_5/modeling_qwen3_5.py) with four projections, each in order."""

    def weights(self, path: str) -> Iterator[Weight]:
        weights = list(super().weights(path))
        yield from (w for w in weights if not w.name.startswith(f"{path}.in_proj"))
        yield from (w for w in weights if w.name.startswith(f"{path}.in_proj"))

    def projection_weights(self, path: str) -> Iterator[Weight]:
        yield from linear_weights(f"{path}.in_proj_qkv", self.hidden, self.conv_dim, "mixer", bias=False)
        yield from linear_weights(f"{path}.in_proj_z", self.hidden, self.values, "mixer", bias=False)
        yield from linear_weights(f"{path}.in_proj_b", self.hidden, self.value_heads, "mixer", bias=False)
        yield from linear_weights(f"{path}.in_proj_a", self.hidden, self.value_heads, "mixer", bias=False)

    @module
    def forward(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        hidden_states = apply_mask_to_padding_states(hidden_states, mask)
        batch, seq, _ = hidden_states.shape
        mixed_qkv = (m / "in_proj_qkv").linear(hidden_states)
        mixed_qkv = transpose(mixed_qkv, 1, 2)
        z = (m / "in_proj_z").linear(hidden_states)
        z = reshape(z, batch, seq, self.value_heads, self.value_dim)
        b = (m / "in_proj_b").linear(hidden_states)
        a = (m / "in_proj_a").linear(hidden_states)
        mixed_qkv = cached_conv1d(m, m / "conv1d", mixed_qkv, self.activation)
        mixed_qkv = transpose(mixed_qkv, 1, 2)
        query, key, value = split(mixed_qkv, self.keys, self.keys, self.values)
        query = reshape(query, batch, seq, self.key_heads, self.key_dim)
        key = reshape(key, batch, seq, self.key_heads, self.key_dim)
        value = reshape(value, batch, seq, self.value_heads, self.value_dim)
        beta = sigmoid(b)
        g = self.decay(m, a)
        core_attn_out, _state = gated_delta_rule(m, query, key, value, g, beta)
        core_attn_out = reshape(core_attn_out, merge(batch, seq, self.value_heads), self.value_dim)
        z = reshape(z, merge(batch, seq, self.value_heads), self.value_dim)
        core_attn_out = self.norm(m / "norm", core_attn_out, z)
        core_attn_out = reshape(core_attn_out, batch, seq, self.values)
        return (m / "out_proj").linear(core_attn_out)


def l2norm(x: Tensor) -> Tensor:
    """Compute `x * rsqrt((x * x).sum(-1, keepdim) + eps)`."""
    inv_norm = rsqrt(sum_last(x * x) + 1e-6)
    return x * inv_norm


def gated_delta_rule(
    m: Module, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the output of the rule and, with a cache, its last state. A single token behind others takes the recurrent
    form."""
    cache = m.run.cache
    if cache is None:
        return chunk_gated_delta_rule(query, key, value, g, beta, output_final_state=False)
    state = cache.state(m, RECURRENT)
    if state is not None:
        core_attn_out, last_recurrent_state = recurrent_gated_delta_rule(query, key, value, g, beta, state)
    else:
        core_attn_out, last_recurrent_state = chunk_gated_delta_rule(
            query, key, value, g, beta, output_final_state=True
        )
    assert last_recurrent_state is not None
    cache.update_state(m, RECURRENT, last_recurrent_state)
    return core_attn_out, last_recurrent_state


def recurrent_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run torch_recurrent_gated_delta_rule for one token; the arguments are those of chunk_gated_delta_rule, which the caller
    holds."""
    _arguments = (query, key, value, g, beta)
    initial_dtype, heads = query.dtype, value.shape[-2]
    if key.shape[2].size != heads.size:
        query = repeat_interleave(query, 2, heads)
        key = repeat_interleave(key, 2, heads)
    query, key, value, beta, decay = [cast_row_major(transpose(x, 1, 2), fp32) for x in (query, key, value, beta, g)]
    query = l2norm(query)
    key = l2norm(key)
    query = query * 1.0
    last_recurrent_state = state
    core_attn_out = like(value, "outputs of the tokens")
    q_t, k_t, v_t = select(query, 2), select(key, 2), select(value, 2)
    decay_t = unsqueeze(unsqueeze(exp(select(decay, 2)), 2), 3)
    last_recurrent_state = last_recurrent_state * decay_t
    beta_t = unsqueeze(select(beta, 2), 2)
    kv_mem = sum_keys(last_recurrent_state * unsqueeze(k_t, 3))
    delta = sub(v_t, kv_mem) * beta_t
    last_recurrent_state = last_recurrent_state + unsqueeze(k_t, 3) * unsqueeze(delta, 2)
    _assigned = sum_keys(last_recurrent_state * unsqueeze(q_t, 3))
    del _assigned
    core_attn_out = cast(contiguous(transpose(core_attn_out, 1, 2)), initial_dtype)
    return core_attn_out, last_recurrent_state


def sum_keys(x: Tensor) -> Tensor:
    """Compute `x.sum(dim=-2)` of (batch, heads, key dim, value dim)."""
    return new_tensor(x.memory, (*x.shape[:2], x.shape[3]), x.dtype, "sum over keys")


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, output_final_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Run torch_chunk_gated_delta_rule: query and key (batch, seq, key heads, key dim), value (batch, seq, value heads,
    value dim), g and beta (batch, seq, value heads). The caller holds the arguments."""
    _arguments = (query, key, value, g, beta)
    initial_dtype = query.dtype
    batch, seq, key_heads, _ = key.shape
    heads, value_dim = value.shape[-2:]
    if key_heads.size != heads.size:
        query = repeat_interleave(query, 2, heads)
        key = repeat_interleave(key, 2, heads)
    query, key, value, beta, decay = [cast_row_major(transpose(x, 1, 2), fp32) for x in (query, key, value, beta, g)]
    query = l2norm(query)
    key = l2norm(key)
    query = query * 1.0

    chunks = Dim("chunks", -(-seq.size // CHUNK.size))
    padded = merge(chunks, CHUNK)
    query, key, value = [pad_dim(x, 2, padded) for x in (query, key, value)]
    beta, decay = [pad_dim(x, 2, padded) for x in (beta, decay)]
    v_beta = value * unsqueeze(beta, 3)
    k_beta = key * unsqueeze(beta, 3)
    query, key, k_beta, v_beta = [
        reshape(x, batch, heads, chunks, CHUNK, x.shape[-1]) for x in (query, key, k_beta, v_beta)
    ]
    decay = reshape(decay, batch, heads, chunks, CHUNK)
    strictly_upper_mask = like(new_tensor(query.memory, (CHUNK, CHUNK), boolean, "ones"), "strictly upper triangle")
    cum_decay = cumsum(decay, 3)

    # 1. within each chunk
    pairwise_decay = sub(unsqueeze(cum_decay, 4), unsqueeze(cum_decay, 3))
    pairwise_decay = masked_fill(pairwise_decay, strictly_upper_mask)
    pairwise_decay = exp(pairwise_decay)
    ut_system = matmul(k_beta, transpose(key, 3, 4), "triangular system") * pairwise_decay
    intra_chunk_attn = matmul(query, transpose(key, 3, 4), "attention within chunks") * pairwise_decay
    decayed_k_beta = k_beta * unsqueeze(exp(cum_decay), 4)
    new_values = solve_triangular(ut_system, v_beta)
    k_cumdecay = solve_triangular(ut_system, decayed_k_beta)

    # 2. from chunk to chunk
    last_recurrent_state = new_tensor(query.memory, (batch, heads, key.shape[-1], value_dim), fp32, "initial state")
    core_attn_out = like(new_values, "outputs of the chunks")
    query = query * unsqueeze(exp(cum_decay), 4)
    key = key * unsqueeze(exp(sub(narrow(cum_decay, 3, ONE_DIM), cum_decay)), 4)
    chunk_decay = unsqueeze(unsqueeze(exp(select(cum_decay, 3)), 3), 4)
    for _ in range(chunks.size):
        v_new = sub(select(new_values, 2), matmul(select(k_cumdecay, 2), last_recurrent_state, "predicted values"))
        inter_chunk_attn = matmul(select(query, 2), last_recurrent_state, "attention to the state")
        core_attn_out = assign_place(
            core_attn_out, 2, inter_chunk_attn + matmul(select(intra_chunk_attn, 2), v_new, "attention within a chunk")
        )
        last_recurrent_state = last_recurrent_state * select(chunk_decay, 2) + matmul(
            transpose(select(key, 2), 2, 3), v_new, "update of the state"
        )
    final_state = last_recurrent_state if output_final_state else None
    del last_recurrent_state
    core_attn_out = reshape(core_attn_out, batch, heads, padded, value_dim)
    core_attn_out = narrow(core_attn_out, 2, seq)
    return cast_row_major(transpose(core_attn_out, 1, 2), initial_dtype), final_state
