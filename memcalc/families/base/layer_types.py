"""Fields of families whose layers attend to different tokens (`layer_types`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from memcalc.errors import quoted
from memcalc.families.base.config import LAYER_TYPES, Count, Layers, LayerType, RotaryConfig

LEGACY_LAYER_TYPES: Mapping[str, str] = {
    "attention": "full_attention",
    "mamba": "linear_attention",
}


@dataclass(frozen=True, kw_only=True)
class LayerTypesConfig(RotaryConfig):
    """A family whose layers attend to different tokens, by one name each in `layer_types`."""

    num_hidden_layers: Layers
    layer_types: list[LayerType] | None = None

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields with the names of transformers 4 replaced (configuration_utils.py,
        remap_legacy_layer_types)."""
        named = super().renamed(config)
        kinds = named.get("layer_types")
        if isinstance(kinds, list):
            named["layer_types"] = [LEGACY_LAYER_TYPES.get(str(kind), kind) for kind in cast("list[Any]", kinds)]
        return named

    def check(self) -> None:
        super().check()
        layers = self.num_hidden_layers
        if self.layer_types is not None and len(self.layer_types) != layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries, num_hidden_layers is {layers}")


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(LayerTypesConfig):
    """A family that has layers with attention to a window."""

    masks_both: ClassVar[bool] = True
    """True if the forward makes a mask with a window even if no layer has one. It fails without a window."""

    sliding_window: Count | None = 4096

    def default_kind(self, i: int) -> LayerType:
        """Return the kind of attention of layer `i` if `layer_types` is left out."""
        raise NotImplementedError

    @property
    def kinds(self) -> list[LayerType]:
        """Return the kind of attention of each layer."""
        if self.layer_types is not None:
            return list(self.layer_types)
        return [self.default_kind(i) for i in range(self.num_hidden_layers)]

    def check(self) -> None:
        super().check()
        if self.sliding_window is None and (self.masks_both or "sliding_attention" in self.kinds):
            raise ValueError("sliding_window is None, which fails in transformers; allowed: a number of tokens")


@dataclass(frozen=True, kw_only=True)
class RotaryByKindConfig(LayerTypesConfig):
    """A family whose `rope_parameters` hold one set per kind of layer (models/gemma3/configuration_gemma3.py)."""

    def rope_of(self, kind: str) -> dict[str, Any]:
        """Return one kind's parameters (convert_rope_params_to_dict). `rope_scaling` belongs to the layers with full
        attention."""
        given = self.rope_parameters or {}
        rope: dict[str, Any] = {**(given.get(kind) or {})}
        if kind == "full_attention":
            rope |= self.rope_scaling or {}
            if self.rope_parameters is None:
                rope.setdefault("rope_type", "default")
        rope.setdefault("rope_type", rope.get("type", "default"))
        rope.setdefault("partial_rotary_factor", self.default_rotary_factor)
        return rope

    @property
    def rope(self) -> dict[str, Any]:
        return self.rope_of("full_attention")

    def check(self) -> None:
        given = self.rope_parameters
        for kind in LAYER_TYPES:
            if not isinstance((given or {}).get(kind), dict | None):
                raise ValueError(f"rope_parameters {kind} {quoted((given or {})[kind])} is not an object or null")
        super().check()
        if self.rope_scaling is not None and given is not None and given.get("full_attention") is None:
            raise ValueError("rope_scaling has no place in rope_parameters without 'full_attention'")
        self.check_rope(self.rope_of("sliding_attention"))
