"""Apertus (models/apertus/modeling_apertus.py): Llama with norms over heads and an MLP without a gate, whose activation has
parameters.

The activation in plain torch (activations.py, XIELUActivation), as runs without the package xielu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from memcalc.core.dims import ONE_DIM
from memcalc.core.dtypes import boolean
from memcalc.core.ops.elementwise import like, sub
from memcalc.core.ops.exponential import expm1, softplus
from memcalc.core.ops.selection import maximum, where_of_two
from memcalc.families.base.blocks import Rotary, act
from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.plans import NORMED_HEADS, UNGATED
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import HeadNorm, PlainMLP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class ApertusConfig(DecoderConfig):
    """The fields and defaults of models/apertus/configuration_apertus.py."""

    null_head_dim: ClassVar[bool] = False

    vocab_size: Count = 131072
    pad_token_id: int | None = 3
    hidden_size: Count = 4096
    intermediate_size: Count = 14336
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    hidden_act: Activation | Literal["xielu"] = "xielu"
    max_position_embeddings: Count = 65536
    attention_bias: bool = False

    @property
    def rope(self) -> dict[str, Any]:
        """Return the rotary parameters; the default is Llama 3's."""
        rope = super().rope
        if self.rope_parameters is None and self.rope_scaling is None:
            rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return rope


class Apertus(HeadNorm, PlainMLP):
    """The program of ApertusForCausalLM."""

    Config = ApertusConfig

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights()
        yield from self.mlp_weights()
        yield from self.norm_weights("attention_layernorm")
        yield from self.norm_weights("feedforward_layernorm")

    def mlp_weights(self) -> Iterator[Weight]:
        yield from super().mlp_weights()
        if self.config.hidden_act == "xielu":
            yield Weight("mlp.act_fn.alpha_p", (ONE_DIM,), "mlp")
            yield Weight("mlp.act_fn.alpha_n", (ONE_DIM,), "mlp")

    def layer_buffers(self, i: int) -> Iterator[Buffer]:
        if self.config.hidden_act == "xielu":
            yield Buffer("mlp.act_fn.beta", ())
            yield Buffer("mlp.act_fn.eps", ())

    def buffers(self) -> Iterator[Buffer]:
        yield from self.buffer_stack("model.layers")
        yield from super().buffers()

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "attention_layernorm", hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(m / "feedforward_layernorm", hidden_states)
        hidden_states = self.mlp(m / "mlp", hidden_states)
        return residual + hidden_states

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        hidden_act = self.config.hidden_act
        up = (m / "up_proj").linear(x)
        activated = self.xielu(m / "act_fn", up) if hidden_act == "xielu" else act(up, hidden_act)
        del up
        return (m / "down_proj").linear(activated)

    @module
    def xielu(self, m: Module, x: Tensor) -> Tensor:
        beta = m.buffer("beta")
        alpha_p = softplus(m.weight("alpha_p"))
        alpha_n = beta + softplus(m.weight("alpha_n"))
        return where_of_two(
            like(x, "positive", boolean),
            alpha_p * x * x + beta * x,
            sub(expm1(maximum(x, m.buffer("eps"))), x) * alpha_n + beta * x,
        )


FAMILY: Final = Family(
    "apertus",
    Apertus,
    Support(tensor_parallel={**UNGATED, **NORMED_HEADS}, context_parallel=True, ulysses=True, stages=True),
)
