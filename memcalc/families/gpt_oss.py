"""gpt-oss (models/gpt_oss/modeling_gpt_oss.py): eager attention with a sink for each head, windows in half the layers, and
experts with biases.

transformers offers no sdpa for it (`_supports_sdpa = False`): the kernel has no sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import ONE_DIM, Dim, merge, plus
from memcalc.core.ops.elementwise import cast, dropout, like, scale, sigmoid, softmax, sub
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.routing import maximum, topk
from memcalc.core.ops.selection import clamp
from memcalc.core.ops.shape import cat, chunk, contiguous, every_second, expand, part, reshape, transpose, unsqueeze
from memcalc.families.base.blocks import Attended, repeat_kv, rms_norm_in_fp32, rotary_angles
from memcalc.families.base.config import Activation, Count, Layers, Probability, check_divides
from memcalc.families.base.experts import REFUSED, Experts, check_experts
from memcalc.families.base.layer_types import LayerTypesConfig
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Module, Run, Weight, module
from memcalc.families.base.router_outputs import RouterOutputs, RouterOutputsConfig
from memcalc.families.base.support import Family, Support

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(RouterOutputsConfig, LayerTypesConfig):
    """The fields and defaults of models/gpt_oss/configuration_gpt_oss.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 201088
    hidden_size: Count = 2880
    intermediate_size: Count = 2880
    num_hidden_layers: Layers = 36
    num_attention_heads: Count = 64
    num_key_value_heads: Count = 8
    head_dim: Count = 64
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 131072
    tie_word_embeddings: bool = False
    sliding_window: Count = 128
    attention_bias: bool = True
    attention_dropout: Probability = 0.0
    num_local_experts: Count = 128
    num_experts_per_tok: Count = 4

    @property
    def kinds(self) -> list[str]:
        """Return the kind of attention of each layer."""
        if self.layer_types is not None:
            return list(self.layer_types)
        return ["full_attention" if i % 2 else "sliding_attention" for i in range(self.num_hidden_layers)]

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "num_local_experts", "hidden_size", "intermediate_size")


class ClampedExperts(Experts):
    """A module like GptOssExperts. Gate and up are interleaved, and both are clamped."""

    def apply_gate(self, gate_up_out: Tensor) -> Tensor:
        gate, up = every_second(gate_up_out), every_second(gate_up_out)
        gate = clamp(gate, 1)
        up = clamp(up, 2)
        glu = gate * sigmoid(gate * 1.702)
        return (up + 1.0) * glu


class GptOss(RouterOutputs):
    """The program of GptOssForCausalLM."""

    Config = GptOssConfig
    balances = True
    attention_kinds = ("eager",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kinds: list[str] = config.kinds
        self.routed = (config.num_experts_per_tok, config.num_local_experts)
        self.per_token, self.experts_dim = Dim("experts_per_token", self.routed[0]), Dim("experts", self.routed[1])
        self.experts = ClampedExperts(
            self.experts_dim,
            self.per_token,
            self.hidden,
            self.ffn,
            config.hidden_act,
            is_transposed=True,
            has_bias=True,
        )

    def attention_weights(self) -> Iterator[Weight]:
        yield Weight("self_attn.sinks", (self.heads,), "attention")
        yield from super().attention_weights()

    def mlp_weights(self) -> Iterator[Weight]:
        yield Weight("mlp.router.weight", (self.experts_dim, self.hidden), "router")
        yield Weight("mlp.router.bias", (self.experts_dim,), "router")
        yield from self.experts.weights("mlp.experts")

    def layer_kind(self, i: int) -> str:  # of one variant: eager attention adds a mask of the same size in every layer
        return self.kinds[i]

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        full = causal_mask(run)
        return {"full_attention": full, "sliding_attention": causal_mask(run, self.config.sliding_window)}

    def position_embeddings(self, m: Module, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of GptOssRotaryEmbedding: one angle for each pair of dims."""
        run = m.run
        run.memory.scope = m.path
        grad_enabled, run.memory.grad_enabled = run.memory.grad_enabled, False
        freqs = rotary_angles(m, positions, self.rope_type)
        cos = scale(like(freqs, "cos"), "mul", "cos")
        sin = scale(like(freqs, "sin"), "mul", "sin")
        cos, sin = cast(cos, run.dtype, "cos"), cast(sin, run.dtype, "sin")
        run.memory.grad_enabled = grad_enabled
        return cos, sin

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return rms_norm_in_fp32(m, hidden_states)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
        q_embed = _apply_rotary_emb(q, cos, sin)
        k_embed = _apply_rotary_emb(k, cos, sin)
        return q_embed, k_embed

    def attend(self, m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
        return eager_attention_with_sinks(q, k, v, mask, m.weight("sinks"), p=self.config.attention_dropout)

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, positions: Tensor
    ) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states, _ = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states, _ = self.sparse_mlp(m / "mlp", hidden_states)
        return residual + hidden_states

    @module
    def sparse_mlp(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of GptOssMLP."""
        batch, seq, hidden = hidden_states.shape
        hidden_states = reshape(hidden_states, merge(batch, seq), hidden)
        _logits, router_scores, router_indices = self.router(m / "router", hidden_states)
        hidden_states = self.experts.forward(m / "experts", hidden_states, router_indices, router_scores)
        hidden_states = reshape(hidden_states, batch, seq, hidden)
        return hidden_states, router_scores

    @module
    def router(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of GptOssTopKRouter."""
        router_logits = m.linear(hidden_states)
        router_top_value, router_indices = topk(router_logits, self.per_token)
        router_scores = softmax(router_top_value, router_top_value.dtype)
        m.run.collect(m.layer, router_logits)
        return router_logits, router_scores, router_indices


def _apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first_half, second_half = chunk(x, 2)
    first_ = sub(first_half * cos, second_half * sin)
    second_ = second_half * cos + first_half * sin
    return cat((first_, second_), x.shape[-1])


def eager_attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor, *, p: float
) -> Attended:
    """Return gpt-oss's eager_attention_forward: each row of scores has one more column, dropped after the softmax."""
    batch, heads, seq, _ = q.shape
    key_states = repeat_kv(k, heads)
    value_states = repeat_kv(v, heads)
    attn_weights = scale(matmul(q, transpose(key_states, 2, 3), "attention scores"), "mul")
    if mask is not None:
        attn_weights = attn_weights + mask
    sinks = expand(reshape(sinks, ONE_DIM, heads, ONE_DIM, ONE_DIM), batch, heads, seq, ONE_DIM)
    combined_logits = cat((attn_weights, sinks), plus(k.shape[2], 1))
    combined_logits = sub(combined_logits, unsqueeze(maximum(combined_logits), 3))
    probs = softmax(combined_logits, combined_logits.dtype)
    scores = part(probs, k.shape[2])
    attn_weights = cast(dropout(scores, p), value_states.dtype)
    attn_output = matmul(attn_weights, value_states, "attention output")
    attn_output = contiguous(transpose(attn_output, 1, 2))
    return attn_output, attn_weights


FAMILY: Final = Family("gpt_oss", GptOss, Support(tensor_parallel={"lm_head": "colwise_gather_output"}, stages=True))
