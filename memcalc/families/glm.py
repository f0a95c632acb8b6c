"""GLM (models/glm/modeling_glm.py): Llama with a joined MLP, rotating pairs of a part of each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dims import merge
from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers
from memcalc.families.base.plans import GLM
from memcalc.families.base.rotary import apply_partial_rotary_pos_emb, repeat_pairs, rotate_pairs
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import JoinedMLP
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Weight


@dataclass(frozen=True, kw_only=True)
class GlmConfig(DecoderConfig):
    """The fields and defaults of models/glm/configuration_glm.py and models/glm4/configuration_glm4.py."""

    rotates_part: ClassVar[bool] = True

    vocab_size: Count = 151552
    pad_token_id: int | None = 151329
    hidden_size: Count = 4096
    intermediate_size: Count = 13696
    num_hidden_layers: Layers = 40
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 2
    head_dim: Count = 128
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 131072
    attention_bias: bool = True

    @property
    def default_rotary_factor(self) -> float:
        return 0.5 if self.partial_rotary_factor is None else self.partial_rotary_factor


class Glm(JoinedMLP):
    """The program of GlmForCausalLM."""

    Config = GlmConfig

    def attention_weights(self) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(
                f"self_attn.{name}", self.hidden, out, "attention", bias=self.config.attention_bias
            )
        yield from linear_weights("self_attn.o_proj", q, self.hidden, "attention", bias=False)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_partial_rotary_pos_emb(q, k, repeat_pairs(cos), repeat_pairs(sin), rotate_pairs)


FAMILY: Final = Family(
    "glm",
    Glm,
    Support(tensor_parallel=GLM, context_parallel=True, ulysses=True, ulysses_wants_head_dim=True, stages=True),
)
