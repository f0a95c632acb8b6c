"""Qwen3.5 (models/qwen3_5/modeling_qwen3_5.py), the language model: Qwen3-Next without experts, its projections apart, and
positions of three kinds.

As `delta` says, the path in plain torch, as runs without the packages fla and causal_conv1d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32
from memcalc.core.ops.axes import select
from memcalc.core.ops.elementwise import cast, like, mul, scale
from memcalc.core.ops.shape import cat, expand, unsqueeze
from memcalc.families.base.blocks import Rotary, frequency_update
from memcalc.families.base.config import Activation, Count, Layers, Probability, check_divides
from memcalc.families.base.delta import ProjectedApart
from memcalc.families.base.plans import LINEAR_OUT, LLAMA, NORMED_HEADS, PROJECTED_APART
from memcalc.families.base.support import Family, Support
from memcalc.families.qwen3_next import DeltaConfig, DeltaLayers

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Module

GRIDS = Dim("3", 3)


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(DeltaConfig):
    """The parts that the dense model and the one with experts share."""

    rotates_part: ClassVar[bool] = True

    vocab_size: Count = 248320
    pad_token_id: int | None = None
    num_attention_heads: Count = 16
    head_dim: Count = 256
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 32768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: Probability = 0.0

    @property
    def default_rotary_factor(self) -> float:
        return 0.25 if self.partial_rotary_factor is None else self.partial_rotary_factor

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, kw_only=True)
class Qwen35TextConfig(Qwen35Config):
    """The fields and defaults of models/qwen3_5/configuration_qwen3_5.py."""

    hidden_size: Count = 4096
    intermediate_size: Count = 12288
    num_hidden_layers: Layers = 32
    num_key_value_heads: Count = 4


class Qwen35Layers(DeltaLayers):
    """The parts that the dense model and the one with experts share."""

    delta_net = ProjectedApart

    def position_embeddings(self, m: Module, positions: Tensor) -> Rotary:
        """Return the output of Qwen3_5TextRotaryEmbedding. It has angles for time, height and width; each dim takes one."""
        run = m.run
        run.memory.scope = m.path
        grad_enabled, run.memory.grad_enabled = run.memory.grad_enabled, False
        position_ids = expand(unsqueeze(positions, 0), GRIDS, run.batch, run.seq)
        frequency_update(m, self.rope_type)
        freqs = mul(cast(unsqueeze(position_ids, 3), fp32), cast(run.buffers[f"{m.path}.inv_freq"], fp32))
        cos = scale(like(freqs, "cos"), "mul", "cos")
        sin = scale(like(freqs, "sin"), "mul", "sin")
        sin = self.recomposition_frequencies(sin)
        cos = self.recomposition_frequencies(cos)
        cos, sin = cast(cos, run.dtype, "cos"), cast(sin, run.dtype, "sin")
        run.memory.grad_enabled = grad_enabled
        return cos, sin

    def recomposition_frequencies(self, freq: Tensor) -> Tensor:
        """Return the angles: those of height and width overwrite some of time's, in place."""
        freqs_thw = select(freq, 0)
        return cat((freqs_thw, freqs_thw), self.rotary_dim)


class Qwen35Text(Qwen35Layers):
    """The program of Qwen3_5ForCausalLM."""

    Config = Qwen35TextConfig


FAMILY: Final = Family(
    "qwen3_5_text",
    Qwen35Text,
    Support(
        tensor_parallel={**LLAMA, **NORMED_HEADS, **PROJECTED_APART, LINEAR_OUT: "colwise_gather_output"},
        uses_weights_within=True,
    ),
)
