"""Stacks in which another mixer replaces attention in some layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from memcalc.families.base.blocks import position_ids
from memcalc.families.base.layer_types import LayerTypesConfig
from memcalc.families.base.masks import recurrent_mask
from memcalc.families.base.module import Module, Run, State, Weight, module
from memcalc.families.llama import Llama, linear_weights

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from memcalc.core.tensor import Tensor


LinearOrFull = Literal["linear_attention", "full_attention"]


@dataclass(frozen=True, kw_only=True)
class LinearOrFullConfig(LayerTypesConfig):
    """A family that has layers with linear attention: its cost is linear in the sequence length."""

    layer_types: list[LinearOrFull] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def default_kind(self, i: int) -> LinearOrFull:
        """Return the kind of layer `i` if `layer_types` is left out."""
        raise NotImplementedError

    @property
    def kinds(self) -> list[LinearOrFull]:
        """Return the kind of each layer."""
        if self.layer_types is not None:
            return list(self.layer_types)
        return [self.default_kind(i) for i in range(self.num_hidden_layers)]


class LinearOrFullLayers(Llama):
    """Llama's stack in which each layer takes the masks and rotary positions of its kind. The configuration is a
    LinearOrFullConfig."""

    polynomial = False
    other_kind = "linear_attention"
    """The kind of layers without full attention."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kinds: list[str] = config.kinds

    def linear(self, i: int) -> bool:
        """Tell whether layer `i` has no full attention."""
        return self.kinds[i] == self.other_kind

    def variant(self, i: int) -> Hashable:
        return super().variant(i), self.kinds[i]

    def layer_kind(self, i: int) -> str:
        return self.kinds[i]

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        return {**super().masks(run), self.other_kind: recurrent_mask(run)}

    def rotary_embeddings(self, m: Module, positions: Tensor) -> dict[str, Any]:
        return dict.fromkeys(("full_attention", self.other_kind), self.position_embeddings(m, positions))


class Hybrid(Llama):
    """Llama's stack with a `mamba` instead of some layers' `self_attn`, and other names."""

    polynomial = False
    final_norm = "final_layernorm"
    mixer: Any

    def mixes(self, i: int) -> bool:
        """Tell whether layer `i` has a state-space mixer."""
        raise NotImplementedError

    def variant(self, i: int) -> Hashable:
        return self.mixes(i)

    def states(self, i: int) -> tuple[State, ...]:
        return self.mixer.states() if self.mixes(i) else ()

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.mixer.weights("mamba") if self.mixes(i) else self.attention_weights()
        yield from self.feed_forward_weights(i)
        yield Weight("input_layernorm.weight", (self.hidden,), "norm")
        yield Weight("pre_ff_layernorm.weight", (self.hidden,), "norm")

    def feed_forward_weights(self, i: int) -> Iterator[Weight]:
        bias = getattr(self.config, "mlp_bias", False)
        yield from linear_weights("feed_forward.gate_proj", self.hidden, self.ffn, "mlp", bias=bias)
        yield from linear_weights("feed_forward.up_proj", self.hidden, self.ffn, "mlp", bias=bias)
        yield from linear_weights("feed_forward.down_proj", self.ffn, self.hidden, "mlp", bias=bias)

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = self.embed(m, ids)
        hidden_states = inputs_embeds
        positions = position_ids(run)
        mask = self.masks(run)["full_attention"]
        padding = recurrent_mask(run)
        position_embeddings = self.position_embeddings(m / "rotary_emb", positions)
        _attn_weights: Tensor | None = None
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.layers.*", i)
            own_mask = padding if self.mixes(i) else mask
            outputs: Any = self.call_layer(layer, hidden_states, position_embeddings, own_mask, positions)
            hidden_states, _attn_weights = outputs
            del outputs
        run.memory.enter(run.memory.phase, None)
        return self.norm(m / self.final_norm, hidden_states)

    @module
    def layer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, rotary: Any, mask: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the attention weights if the layer hands them to the model, whose frame keeps them."""
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states, kept = self.mix(m, hidden_states, rotary, mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(m / "pre_ff_layernorm", hidden_states)
        hidden_states = self.mlp(m / "feed_forward", hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states, kept if self.hands_weights_on else None

    hands_weights_on = False

    def mix(self, m: Module, x: Tensor, rotary: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        """Return the sequence mixer's output, and what the layer's frame also keeps: the attention's weights."""
        assert m.layer is not None
        if self.mixes(m.layer):
            return self.mixer.forward(m / "mamba", x, mask), None
        return self.attention(m / "self_attn", x, rotary, mask)
