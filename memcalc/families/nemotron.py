"""Nemotron (models/nemotron/modeling_nemotron.py): layer norms whose weight is an offset from 1, an MLP without a gate,
rotating a part of each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dims import Dim
from memcalc.core.ops.elementwise import cast
from memcalc.core.ops.norm import layer_norm
from memcalc.core.ops.shape import cat, part, rotate_half, unsqueeze
from memcalc.core.tensor import Autocast
from memcalc.families.base.config import Activation, Count, DecoderConfig, Fraction, Layers
from memcalc.families.base.plans import UNGATED
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import LayerNorm, PlainMLP

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Module


@dataclass(frozen=True, kw_only=True)
class NemotronConfig(DecoderConfig):
    """The fields and defaults of models/nemotron/configuration_nemotron.py."""

    rotates_part: ClassVar[bool] = True

    vocab_size: Count = 256000
    hidden_size: Count = 6144
    intermediate_size: Count = 24576
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 48
    hidden_act: Activation = "relu2"
    max_position_embeddings: Count = 4096
    partial_rotary_factor: Fraction = 0.5
    attention_bias: bool = False
    mlp_bias: bool = False

    def check(self) -> None:
        super().check()
        if self.num_key_value_heads is None:
            raise ValueError("num_key_value_heads None fails in transformers; allowed: a number")


class Nemotron(PlainMLP, LayerNorm):
    """The program of NemotronForCausalLM."""

    Config = NemotronConfig

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of NemotronLayerNorm1P, which under autocast casts to 16 bits itself."""
        memory = m.run.memory
        with m:
            args = [hidden_states, m.weight() + 1.0, m.weight("bias")]
            if memory.autocast is not None and memory.autocast.dtype is not None:
                args = [cast(arg, memory.autocast.dtype) for arg in args]
            with Autocast(memory, None):
                return layer_norm(*args)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
        head_dim, rotary_dim = q.shape[3], cos.shape[3]
        rest = Dim("head_dim-rotary_dim", head_dim.size - rotary_dim.size)
        q, q_pass = part(q, rotary_dim), part(q, rest)
        k, k_pass = part(k, rotary_dim), part(k, rest)
        q_embed = (q * cos) + (rotate_half(q) * sin)
        k_embed = (k * cos) + (rotate_half(k) * sin)
        return cat((q_embed, q_pass), head_dim), cat((k_embed, k_pass), head_dim)


FAMILY: Final = Family(
    "nemotron",
    Nemotron,
    Support(tensor_parallel=UNGATED, sequence_parallel=True, context_parallel=True, ulysses=True, stages=True),
)
