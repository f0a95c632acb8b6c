"""Gemma 2 (models/gemma2/modeling_gemma2.py): four norms a layer, capped scores and logits, windows in half the layers.

transformers offers no sdpa for it (`_supports_sdpa = False`): the kernel could not cap the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from memcalc.dtypes import fp32
from memcalc.families.blocks import Attended, eager_attention
from memcalc.families.config import (
    Activation,
    Count,
    Layers,
    LayerTypesConfig,
    Probability,
    check_divides,
)
from memcalc.families.llama import Llama
from memcalc.families.masks import causal_mask
from memcalc.families.module import Buffer, Module, Run, Weight, module
from memcalc.ops.elementwise import cast, mean, power, rsqrt, scale, tanh
from memcalc.ops.replaceable import replaceable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(LayerTypesConfig):
    """models/gemma2/configuration_gemma2.py"""

    refused: ClassVar[Mapping[str, Sequence[Any]]] = {"use_bidirectional_attention": (False, None)}

    vocab_size: Count = 256000
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
    attention_dropout: Probability = 0.0
    sliding_window: Count = 4096
    final_logit_softcapping: float | None = 30.0
    attn_logit_softcapping: float | None = 50.0

    @property
    def hidden_act(self) -> str:
        return self.hidden_activation

    @property
    def kinds(self) -> list[str]:
        """What each layer attends to."""
        if self.layer_types is not None:
            return list(self.layer_types)
        return ["full_attention" if i % 2 else "sliding_attention" for i in range(self.num_hidden_layers)]

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")
        check_divides(self, "num_attention_heads", "num_key_value_heads")


class Gemma2(Llama):
    """The program of Gemma2ForCausalLM."""

    Config = Gemma2Config
    attention_kinds = ("eager",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kinds: list[str] = config.kinds

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from super().layer_weights(i)
        yield Weight("pre_feedforward_layernorm.weight", (self.hidden,), "norm")
        yield Weight("post_feedforward_layernorm.weight", (self.hidden,), "norm")

    def buffers(self) -> Iterator[Buffer]:
        yield Buffer("model.embed_tokens.embed_scale", ())
        yield from super().buffers()

    def layer_kind(self, i: int) -> str:  # of one variant: eager attention adds a mask of the same size in every layer
        return self.kinds[i]

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        full = causal_mask(run)
        return {"full_attention": full, "sliding_attention": causal_mask(run, self.config.sliding_window)}

    def embed(self, m: Module, ids: Tensor) -> Tensor:
        return super().embed(m, ids) * m.run.buffers[f"{m.path}.embed_tokens.embed_scale"]

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return gemma_rms_norm(m, hidden_states)

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        logits = super().head(root, hidden_states)
        if self.config.final_logit_softcapping is not None:
            logits = scale(logits, "div")
            logits = tanh(logits)
            logits = scale(logits, "mul")
        return logits

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, positions: Tensor
    ) -> Tensor:
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
        softcap = self.config.attn_logit_softcapping is not None
        return eager_attention(q, k, v, mask, p=self.config.attention_dropout, softcap=softcap)


@replaceable
def gemma_rms_norm(m: Module, hidden_states: Tensor) -> Tensor:
    """Gemma2RMSNorm: the weight is an offset from 1, multiplied in fp32."""
    with m:
        output = _norm(cast(hidden_states, fp32))
        output = output * (1.0 + cast(m.weight(), fp32))
        return cast(output, hidden_states.dtype)


def _norm(x: Tensor) -> Tensor:
    return x * rsqrt(mean(power(x, 2)) + 1e-6)
