"""Ministral 3 (models/ministral3/modeling_ministral3.py): Mistral that scales q by its position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import merge
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast, like
from memcalc.core.ops.shape import reshape, unsqueeze
from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers
from memcalc.families.base.module import Module, module
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.mistral import Mistral

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.blocks import Attended, Rotary


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(DecoderConfig):
    """The fields and defaults of models/ministral3/configuration_ministral3.py."""

    vocab_size: Count = 131072
    pad_token_id: int | None = 11
    hidden_size: Count = 4096
    intermediate_size: Count = 14336
    num_hidden_layers: Layers = 34
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 8
    head_dim: Count = 128
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 262144
    sliding_window: Count | None = None

    @property
    def rope(self) -> dict[str, Any]:
        if self.rope_scaling or self.rope_parameters is not None:
            return super().rope
        return {"rope_type": "yarn", "factor": 16.0, "partial_rotary_factor": 1.0, "llama_4_scaling_beta": 0.1}

    def check(self) -> None:
        super().check()
        rope = self.rope
        needed = ["llama_4_scaling_beta"]
        if rope["rope_type"] not in ("llama3", "yarn", "longrope"):  # those have max_position_embeddings in its place
            needed.append("original_max_position_embeddings")
        for key in needed:
            if rope.get(key) is None:
                raise ValueError(f"rope_parameters lack {key!r}, without which transformers fails")


class Ministral3(Mistral):
    """The program of Ministral3ForCausalLM."""

    Config = Ministral3Config

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask, positions)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states = self.mlp(m / "mlp", hidden_states)
        return residual + hidden_states

    @module
    def attention(
        self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor | None = None
    ) -> Attended:
        assert positions is not None
        query_states, key_states, value_states = self.rotated_qkv(m, hidden_states, rotary)
        query_states = query_states * cast(_attention_scale(positions), query_states.dtype)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = reshape(attn_output, *hidden_states.shape[:-1], merge(self.heads, self.head_dim))
        attn_output = (m / "o_proj").linear(attn_output)
        return attn_output, attn_weights


def _attention_scale(positions: Tensor) -> Tensor:
    """Return get_llama_4_attn_scale, (1, 1, seq, 1): 1 + beta * log(1 + floor(positions / max_position_embeddings))."""
    scaling = like(positions, "positions / max_position_embeddings", fp32)
    for name in ("floor", "1 +", "log", "beta *", "1 +"):
        scaling = like(scaling, name)
    return unsqueeze(unsqueeze(scaling, 1), 3)


FAMILY: Final = Family(
    "ministral3",
    Ministral3,
    Support(tensor_parallel=LLAMA, sequence_parallel=True, context_parallel=True, ulysses=True, stages=True),
)
