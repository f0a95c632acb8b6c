"""MiniMax-M2 (models/minimax_m2/modeling_minimax_m2.py): Mixtral with norms over the whole of q and of k, a part of each head
rotated, and sigmoids that choose the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import merge
from memcalc.core.ops.shape import reshape, view
from memcalc.families.base.config import Activation, Count, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.base.experts import REFUSED, SigmoidRouter, check_experts
from memcalc.families.base.module import Buffer, Module, module
from memcalc.families.base.normed_projections import NormedProjections
from memcalc.families.base.plans import ENDS, EXPERTS, GATHERED_ATTENTION
from memcalc.families.base.rotary import apply_partial_rotary_pos_emb
from memcalc.families.base.router_outputs import RouterOutputsConfig
from memcalc.families.base.support import Family, Support
from memcalc.families.mixtral import Mixtral

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(RouterOutputsConfig, RotaryConfig):
    """The fields and defaults of models/minimax_m2/configuration_minimax_m2.py."""

    rotates_part: ClassVar[bool] = True
    attribute_map: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {**REFUSED, "router_jitter_noise": (0, 0.0)}
    sliding_window: ClassVar[None] = None

    vocab_size: Count = 200064
    hidden_size: Count = 3072
    intermediate_size: Count = 1536
    num_hidden_layers: Layers = 62
    num_attention_heads: Count = 48
    num_key_value_heads: Count = 8
    head_dim: Count = 128
    rotary_dim: Count | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 196608
    tie_word_embeddings: bool = False
    attention_dropout: Probability = 0.0
    num_experts_per_tok: Count = 8
    num_local_experts: Count = 256

    @property
    def default_rotary_factor(self) -> float:
        if self.partial_rotary_factor is None and self.rotary_dim is not None:
            return self.rotary_dim / self.head_dim
        return super().default_rotary_factor

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "num_local_experts", "hidden_size", "intermediate_size")


class MiniMaxM2(NormedProjections, Mixtral):
    """The program of MiniMaxM2ForCausalLM."""

    Config = MiniMaxM2Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.router = SigmoidRouter(self.experts.count, self.experts.per_token, self.hidden)

    def layer_buffers(self, i: int) -> Iterator[Buffer]:
        yield Buffer("mlp.e_score_correction_bias", (self.experts.count,))

    def buffers(self) -> Iterator[Buffer]:
        yield from self.buffer_stack("model.layers")
        yield from super().buffers()

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_partial_rotary_pos_emb(q, k, cos, sin)

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of MiniMaxM2SparseMoeBlock."""
        batch, seq, hidden = x.shape
        hidden_states = view(x, merge(batch, seq), hidden)
        correction = m.buffer("e_score_correction_bias")
        _logits, top_k_weights, top_k_index = self.router.forward(m / "gate", hidden_states, correction)
        hidden_states = self.experts.forward(m / "experts", hidden_states, top_k_index, top_k_weights)
        return reshape(hidden_states, batch, seq, hidden)


FAMILY: Final = Family(
    "minimax_m2",
    MiniMaxM2,
    Support(
        tensor_parallel={**ENDS, **GATHERED_ATTENTION, **EXPERTS}, context_parallel=True, ulysses=True, stages=True
    ),
)
