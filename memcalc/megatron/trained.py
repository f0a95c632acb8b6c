"""The part of GPTModel's weights that trains, and its adapters."""

from __future__ import annotations

from typing import Final, NamedTuple

TARGETS: Final = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The layers that Megatron-Bridge adapts by default (megatron/bridge/peft/lora.py, LoRA.target_modules)."""


class Adapters(NamedTuple):
    """The options of Megatron-Bridge's LoRA that sizes depend on."""

    rank: int
    targets: frozenset[str]
    dropout: float


class Trained(NamedTuple):
    """The names of the weights that are frozen, and the adapters beside them."""

    of_layers: tuple[frozenset[str], ...]
    """The frozen weights of each layer."""
    of_ends: frozenset[str]
    """The frozen weights outside of the layers."""
    adapters: Adapters | None
    experts: bool
    """True if the optimizer has a weight of some expert of the model, on whatever stage."""

    def of_span(self, start: int, layers: int) -> Trained:
        """Return the part of `layers` layers from `start` on."""
        return self._replace(of_layers=self.of_layers[start : start + layers])

    @property
    def frozen_by_layer(self) -> dict[int | None, frozenset[str]]:
        """Return the frozen names by layer."""
        named = {None: self.of_ends, **dict(enumerate(self.of_layers))}
        return {layer: names for layer, names in named.items() if names}
