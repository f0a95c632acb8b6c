"""Gemma 2 (models/gemma2/modeling_gemma2.py): four norms a layer, capped scores and logits, windows in half the layers.

transformers offers no sdpa for it (`_supports_sdpa = False`): the kernel could not cap the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.families.base.blocks import Attended, Rotary, eager_attention, softcap
from memcalc.families.base.config import Activation, Count, Decimal, DecoderConfig, Layers, LayerType, check_divides
from memcalc.families.base.layer_types import WindowedConfig
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import Windowed
from memcalc.families.gemma import Gemma

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(WindowedConfig, DecoderConfig):
    """The fields and defaults of models/gemma2/configuration_gemma2.py."""

    refused: ClassVar[Mapping[str, Sequence[Any]]] = {"use_bidirectional_attention": (False, None)}

    vocab_size: Count = 256000
    pad_token_id: int | None = 0
    hidden_size: Count = 2304
    intermediate_size: Count = 9216
    num_hidden_layers: Layers = 26
    num_attention_heads: Count = 8
    num_key_value_heads: Count = 4
    head_dim: Count = 256
    hidden_activation: Activation = "gelu_pytorch_tanh"
    max_position_embeddings: Count = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    final_logit_softcapping: Decimal | None = 30.0
    attn_logit_softcapping: Decimal | None = 50.0

    @property
    def hidden_act(self) -> str:
        return self.hidden_activation

    def default_kind(self, i: int) -> LayerType:
        return "full_attention" if i % 2 else "sliding_attention"

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")


class Gemma2(Windowed, Gemma):
    """The program of Gemma2ForCausalLM."""

    Config = Gemma2Config
    attention_kinds = ("eager",)

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from super().layer_weights(i)
        yield from self.norm_weights("pre_feedforward_layernorm")
        yield from self.norm_weights("post_feedforward_layernorm")

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        capped = self.config.final_logit_softcapping is not None
        return softcap(super().head(root, hidden_states)) if capped else super().head(root, hidden_states)

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(m / "pre_feedforward_layernorm", hidden_states)
        hidden_states = self.mlp(m / "mlp", hidden_states)
        hidden_states = self.norm(m / "post_feedforward_layernorm", hidden_states)
        return residual + hidden_states

    def attend(self, m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
        capped = self.config.attn_logit_softcapping is not None
        return eager_attention(q, k, v, mask, p=self.config.attention_dropout, softcap=capped)


FAMILY: Final = Family("gemma2", Gemma2, Support(tensor_parallel=LLAMA, liger="gemma2"))
