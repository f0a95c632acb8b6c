"""Command R (models/cohere/modeling_cohere.py): attention and MLP side by side behind one norm, layer norms written op
by op, pairs rotated in fp32, scaled logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast, mean, power, rsqrt, scale, sub
from memcalc.core.ops.shape import transpose, unsqueeze, view
from memcalc.families.base.blocks import QKV, Rotary
from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.rotary import rotate_pairs
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class CohereConfig(DecoderConfig):
    """The fields and defaults of models/cohere/configuration_cohere.py."""

    null_head_dim: ClassVar[bool] = False

    vocab_size: Count = 256000
    pad_token_id: int | None = 0
    hidden_size: Count = 8192
    intermediate_size: Count = 22528
    num_hidden_layers: Layers = 40
    num_attention_heads: Count = 64
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_qk_norm: bool | None = False


class ParallelLayer(Llama):
    """The layer that all generations of Command R share: attention and MLP side by side after one norm."""

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights()
        yield from self.mlp_weights()
        yield from self.norm_weights("input_layernorm")

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of CohereLayerNorm."""
        with m:
            input_dtype = hidden_states.dtype
            hidden_states = cast(hidden_states, fp32)
            average = mean(hidden_states)
            variance = mean(power(sub(hidden_states, average), 2))
            hidden_states = sub(hidden_states, average) * rsqrt(variance + 1e-5)
            hidden_states = cast(m.weight(), fp32) * hidden_states
            return cast(hidden_states, input_dtype)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        dtype = q.dtype
        q, k = cast(q, fp32), cast(k, fp32)
        cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
        q_embed = (q * cos) + (rotate_pairs(q) * sin)
        k_embed = (k * cos) + (rotate_pairs(k) * sin)
        return cast(q_embed, dtype), cast(k_embed, dtype)

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states_attention, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states_mlp = self.mlp(m / "mlp", hidden_states)
        return residual + hidden_states_attention + hidden_states_mlp

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        return scale(super().head(root, hidden_states), "mul", "scaled logits")


class Cohere(ParallelLayer):
    """The program of CohereForCausalLM."""

    Config = CohereConfig

    def attention_weights(self) -> Iterator[Weight]:
        yield from super().attention_weights()
        if self.config.use_qk_norm:
            yield Weight("self_attn.q_norm.weight", (self.heads, self.head_dim), "norm")
            yield Weight("self_attn.k_norm.weight", (self.kv_heads, self.head_dim), "norm")

    def qkv(self, m: Module, hidden_states: Tensor) -> QKV:
        batch, seq, _ = hidden_states.shape
        q = view((m / "q_proj").linear(hidden_states), batch, seq, self.heads, self.head_dim)
        k = view((m / "k_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim)
        v = view((m / "v_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim)
        if self.config.use_qk_norm:
            q = self.norm(m / "q_norm", q)
            k = self.norm(m / "k_norm", k)
        return transpose(q, 1, 2), transpose(k, 1, 2), transpose(v, 1, 2)


FAMILY: Final = Family(
    "cohere",
    Cohere,
    Support(
        tensor_parallel=LLAMA,
        tensor_parallel_without="use_qk_norm",
        sequence_parallel=True,
        context_parallel=True,
        ulysses=True,
        stages=True,
    ),
)
