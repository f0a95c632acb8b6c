"""Granite 4 (models/granitemoehybrid/modeling_granitemoehybrid.py): Granite-MoE with a shared MLP, with Mamba 2 in the place of
attention in most layers, with or without rotary positions, with or without experts.

As Mamba 2, the path in plain torch, as runs without the packages mamba_ssm and causal_conv1d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from memcalc.families.bamba import MixerConfig, mixer_of
from memcalc.families.base.config import Bounds, CountOrNone
from memcalc.families.base.hybrid import LinearOrFull, LinearOrFullConfig, LinearOrFullLayers
from memcalc.families.base.module import Buffer, Module, State, Weight, module
from memcalc.families.base.plans import GRANITE_MOE
from memcalc.families.base.support import Family, Support
from memcalc.families.granitemoe import GraniteMoeConfig
from memcalc.families.granitemoeshared import GraniteMoeShared

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.blocks import QKV


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(GraniteMoeConfig, LinearOrFullConfig, MixerConfig):
    """The fields and defaults of models/granitemoehybrid/configuration_granitemoehybrid.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {"layers_block_type": "layer_types"}

    num_local_experts: Annotated[int, Bounds(ge=0, le=10**7)] = 8
    num_experts_per_tok: Annotated[int, Bounds(ge=0, le=10**7)] = 2
    shared_intermediate_size: CountOrNone = 1024
    position_embedding_type: str | None = None

    def default_kind(self, i: int) -> LinearOrFull:
        return "linear_attention"


class GraniteMoeHybrid(LinearOrFullLayers, GraniteMoeShared):
    """The program of GraniteMoeHybridForCausalLM."""

    Config = GraniteMoeHybridConfig
    shares_always = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not config.num_local_experts:
            self.routed = (1, 1)
        self.mixer = mixer_of(config, self.hidden)
        self.rotates = config.position_embedding_type == "rope"

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.norm_weights("input_layernorm")
        yield from self.norm_weights("post_attention_layernorm")
        yield from self.mlp_weights()
        yield from self.mixer.weights("mamba") if self.linear(i) else self.attention_weights()

    def mlp_weights(self) -> Iterator[Weight]:
        for weight in super().mlp_weights():
            if self.config.num_local_experts or not weight.name.startswith("block_sparse_moe"):
                yield weight

    def states(self, i: int) -> tuple[State, ...]:
        return self.mixer.states() if self.linear(i) else ()

    def frequencies(self) -> Iterator[Buffer]:
        if self.rotates:
            yield from super().frequencies()

    def position_embeddings(self, m: Module, positions: Tensor) -> Any:
        return super().position_embeddings(m, positions) if self.rotates else None

    def rotated_qkv(self, m: Module, hidden_states: Tensor, rotary: Any) -> QKV:
        return super().rotated_qkv(m, hidden_states, rotary) if self.rotates else self.qkv(m, hidden_states)

    def call_layer(self, m: Module, hidden_states: Tensor, *rest: Any) -> Any:
        """Run a layer without the positions."""
        rotary, mask, _positions = rest
        return super().call_layer(m, hidden_states, rotary, mask)

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, rotary: Any, mask: Tensor | None, positions: Tensor | None = None
    ) -> Tensor:
        assert m.layer is not None
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        if self.linear(m.layer):
            hidden_states = self.mixer.forward(m / "mamba", hidden_states, mask)
        else:
            hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = residual + hidden_states * 0.22
        residual = hidden_states
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        if self.config.num_local_experts:
            moe_hidden_states = self.sparse_mlp(m / "block_sparse_moe", hidden_states)
            hidden_states = moe_hidden_states + self.shared_mlp(m / "shared_mlp", hidden_states)
        else:
            hidden_states = self.shared_mlp(m / "shared_mlp", hidden_states)
        return residual + hidden_states * 0.22


FAMILY: Final = Family(
    "granitemoehybrid", GraniteMoeHybrid, Support(tensor_parallel=GRANITE_MOE, uses_weights_within=True)
)
