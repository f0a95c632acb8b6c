"""StableLM (models/stablelm/modeling_stablelm.py): Llama with layer norms that rotates a part of each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.elementwise import dropout
from memcalc.core.ops.shape import cat, split_one
from memcalc.families.base.config import Activation, Count, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import Llama, linear_weights
from memcalc.families.phi import Phi

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class StableLmConfig(RotaryConfig):
    """The fields and defaults of models/stablelm/configuration_stablelm.py."""

    rotates_part: ClassVar[bool] = True
    head_dim: ClassVar[None] = None

    vocab_size: Count = 50304
    intermediate_size: Count = 6912
    hidden_size: Count = 2560
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 32
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 4096
    tie_word_embeddings: bool = False
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False
    hidden_dropout: Probability = 0.0
    attention_dropout: Probability = 0.0

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        if config.get("partial_rotary_factor", 0.25) is None:
            raise ValueError("field `partial_rotary_factor` is None; it should be a number or left out")
        return super().renamed(config)

    @property
    def default_rotary_factor(self) -> float:
        return 0.25 if self.partial_rotary_factor is None else self.partial_rotary_factor

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")
        check_divides(self, "num_attention_heads", "num_key_value_heads")


class StableLm(Phi):
    """The program of StableLmForCausalLM."""

    Config = StableLmConfig
    output = "o_proj"
    final_norm = "norm"

    # --- weights

    def weights(self) -> Iterator[Weight]:
        yield Weight("model.embed_tokens.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("model.layers")
        yield from norm_weights("model.norm", self.hidden)
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        q, kv, bias = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim), self.config.use_qkv_bias
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"self_attn.{name}", self.hidden, out, "attention", bias=bias)
        yield from linear_weights("self_attn.o_proj", q, self.hidden, "attention", bias=False)
        if self.config.qk_layernorm:
            yield from self.head_norm_weights("self_attn.q_layernorm", self.heads)
            yield from self.head_norm_weights("self_attn.k_layernorm", self.kv_heads)
        yield from self.mlp_weights()
        yield from norm_weights("input_layernorm", self.hidden)
        if not self.config.use_parallel_residual:
            yield from norm_weights("post_attention_layernorm", self.hidden)

    def head_norm_weights(self, name: str, heads: Dim) -> Iterator[Weight]:
        for head in range(heads.size):
            yield Weight(f"{name}.norms.{head}.weight", (self.head_dim,), "norm")

    # --- forward

    head = Llama.head
    mlp = Llama.mlp

    def drop_embeds(self, inputs_embeds: Tensor) -> Tensor:
        return inputs_embeds

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, positions: Tensor
    ) -> Tensor:
        p = self.config.hidden_dropout
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        self_attn_output, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        if self.config.use_parallel_residual:
            mlp_output = self.mlp(m / "mlp", hidden_states)
            mlp_output = dropout(mlp_output, p)
            hidden_states = residual + self_attn_output + mlp_output
        else:
            residual = residual + self_attn_output
            mlp_output = self.mlp(m / "mlp", self.norm(m / "post_attention_layernorm", residual))
            mlp_output = dropout(mlp_output, p)
            hidden_states = residual + mlp_output
        return hidden_states

    @module
    def norm_heads(self, m: Module, states: Tensor) -> Tensor:
        """Return the output of StableLmLayerNormPerHead, which has a norm for each head."""
        states_per_heads = split_one(states, 1)
        normed = [(m / f"norms.{i}").layer_norm(head) for i, head in enumerate(states_per_heads)]
        return cat(normed, states.shape[1], 1)


FAMILY: Final = Family("stablelm", StableLm, Support(tensor_parallel={}, context_parallel=True, ulysses=True))
