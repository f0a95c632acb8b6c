"""StarCoder2 (models/starcoder2/modeling_starcoder2.py): Llama with layer norms, an MLP without a gate, dropout, and
one window in all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import merge
from memcalc.core.ops.elementwise import dropout
from memcalc.families.base.blocks import Attended, Rotary, act
from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers, Probability
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Module, Run, Weight, module
from memcalc.families.base.plans import ATTENTION, ENDS
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import LayerNorm
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class Starcoder2Config(DecoderConfig):
    """The fields and defaults of models/starcoder2/configuration_starcoder2.py."""

    vocab_size: Count = 49152
    hidden_size: Count = 3072
    intermediate_size: Count = 12288
    num_hidden_layers: Layers = 30
    num_attention_heads: Count = 24
    num_key_value_heads: Count = 2
    hidden_act: Activation = "gelu_pytorch_tanh"
    max_position_embeddings: Count = 4096
    sliding_window: Count | None = None
    residual_dropout: Probability = 0.0
    embedding_dropout: Probability = 0.0
    use_bias: bool = True
    tie_word_embeddings: bool = True


class Starcoder2(LayerNorm):
    """The program of Starcoder2ForCausalLM."""

    Config = Starcoder2Config

    def attention_weights(self) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        bias = self.config.use_bias
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"self_attn.{name}", self.hidden, out, "attention", bias=bias)
        yield from linear_weights("self_attn.o_proj", q, self.hidden, "attention", bias=bias)

    def mlp_weights(self) -> Iterator[Weight]:
        yield from linear_weights("mlp.c_fc", self.hidden, self.ffn, "mlp", bias=self.config.use_bias)
        yield from linear_weights("mlp.c_proj", self.ffn, self.hidden, "mlp", bias=self.config.use_bias)

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        return {"full_attention": causal_mask(run, self.config.sliding_window)}

    def before_layers(self, m: Module, hidden_states: Tensor) -> Tensor:
        return dropout(hidden_states, self.config.embedding_dropout)

    def attention(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None) -> Attended:
        attn_output, attn_weights = super().attention(m, hidden_states, rotary, mask)
        return dropout(attn_output, self.config.residual_dropout), attn_weights

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        hidden_states = (m / "c_fc").linear(x)
        hidden_states = act(hidden_states, self.config.hidden_act)
        hidden_states = (m / "c_proj").linear(hidden_states)
        return dropout(hidden_states, self.config.residual_dropout)


FAMILY: Final = Family(
    "starcoder2",
    Starcoder2,
    Support(
        tensor_parallel={
            **ENDS,
            **ATTENTION,
            "model.layers.*.mlp.c_fc": "colwise",
            "model.layers.*.mlp.c_proj": "rowwise",
        },
        sequence_parallel=True,
        context_parallel=True,
        ulysses=True,
        stages=True,
    ),
)
