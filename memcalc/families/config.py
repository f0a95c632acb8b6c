"""The fields that every family's `config.json` is read with: strict, frozen, bounded.

A field that is left out has transformers' own default for that `model_type`; a field that memcalc does not know is
ignored, as transformers does, unless it would change what is computed: those are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Count = Annotated[int, Field(ge=1, le=10**7)]
"""A dim of the architecture. The bound only catches nonsense: no published model has a dim of ten million."""

Layers = Annotated[int, Field(ge=1, le=10**4)]
Probability = Annotated[float, Field(ge=0, lt=1)]

Activation = Literal[
    "gelu", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh",
    "hardswish", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "swish",
    "tanh",
]  # fmt: skip
"""Names of transformers' ACT2FN that `blocks.act` writes out."""

LayerType = Literal["full_attention", "sliding_attention"]
RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]

_REFUSED: Mapping[str, Sequence[Any]] = {
    "is_causal": (True,),
    "loss_type": (None, "ForCausalLM"),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
    "per_layer_config": (None,),
}
"""Fields that change the program of every family, each with the values that leave it as it is written here."""


class FamilyConfig(BaseModel):
    """Fields of one `model_type`. pydantic's ValidationError names the field, its value and what is allowed."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", populate_by_name=True)

    refused: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Fields that would change this family's program, each with the values that do not."""

    attribute_map: ClassVar[Mapping[str, str]] = {}
    """Other names that transformers takes for a field, as its configuration class has them."""

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, fields: Any) -> Any:
        """Refuse what is not modelled, and give each field the name that it has here."""
        if not isinstance(fields, Mapping):
            return fields
        for name, allowed in {**_REFUSED, **cls.refused}.items():
            if name in fields and fields[name] not in allowed:
                raise ValueError(f"{name} {fields[name]!r} is not modelled; allowed: {_listed(allowed)}")
        named = dict(fields)
        for other, name in cls.attribute_map.items():
            if other in named:
                value = named.pop(other)
                if named.setdefault(name, value) != value:
                    raise ValueError(f"{other} {value!r} and {name} {named[name]!r} are one field with two values")
        return named


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(repr(value) for value in values)


def check_divides(config: BaseModel, whole: str, part: str) -> None:
    """ValueError unless field `part` (if given) divides field `whole`."""
    total, divisor = getattr(config, whole), getattr(config, part)
    if divisor is not None and total % divisor:
        raise ValueError(f"{whole} {total} does not divide by {part} {divisor}")


# --- rotary positions (modeling_rope_utils.py)

_ROPE_KEYS: Mapping[str, Sequence[str]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""What each kind of rotary scaling has to be given, beside what transformers fills in."""


class RotaryConfig(FamilyConfig):
    """A family with rotary positions. `rope_scaling` is the name of `rope_parameters` before transformers 5."""

    rotates_part: ClassVar[bool] = False
    """Whether the program leaves the rest of a head alone where `partial_rotary_factor` is below 1."""

    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None

    @property
    def rope(self) -> dict[str, Any]:
        """RotaryEmbeddingConfigMixin.convert_rope_params_to_dict, what of it has to do with shapes."""
        rope = {**(self.rope_scaling or self.rope_parameters or {})}
        rope.setdefault("rope_type", rope.get("type", "default"))
        rope.setdefault("partial_rotary_factor", self.default_rotary_factor)
        return rope

    @property
    def default_rotary_factor(self) -> float:
        return 1.0 if self.partial_rotary_factor is None else self.partial_rotary_factor

    @property
    def width_of_head(self) -> int:
        head_dim: int | None = getattr(self, "head_dim", None)
        return head_dim or getattr(self, "hidden_size") // getattr(self, "num_attention_heads")

    @property
    def rotary_width(self) -> int:
        """How many dims of a head are rotated."""
        return int(self.width_of_head * self.rope["partial_rotary_factor"]) if self.rotates_part else self.width_of_head

    @model_validator(mode="after")
    def check_rope(self) -> RotaryConfig:
        rope = self.rope
        nested = [key for key in rope if isinstance(rope[key], dict)]
        if nested:
            raise ValueError(f"rope_parameters by layer type ({nested[0]}) are not what this family reads; allowed: one set")
        kind, factor = rope["rope_type"], rope["partial_rotary_factor"]
        if kind not in _ROPE_KEYS:
            raise ValueError(f"rope_parameters rope_type {kind!r} is not known; allowed: {_listed(tuple(_ROPE_KEYS))}")
        for key in _ROPE_KEYS[kind]:
            if key not in rope:
                raise ValueError(f"rope_parameters of rope_type {kind!r} lack {key!r}")
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
            raise ValueError(f"partial_rotary_factor {factor!r} is not a number above 0 and up to 1")
        if factor != 1 and kind != "default" and not self.rotates_part:
            raise ValueError(f"partial_rotary_factor {factor!r} with rope_type {kind!r} fails in transformers; allowed: 1.0")
        width = self.rotary_width
        if width < 2 or width % 2:
            raise ValueError(f"the rotated part of a head is {width} wide (head_dim {self.width_of_head}): it must be even")
        if kind == "longrope":
            _check_factors(rope, width // 2)
        return self


def _check_factors(rope: Mapping[str, Any], count: int) -> None:
    for key in ("short_factor", "long_factor"):
        factors = rope[key]
        if not isinstance(factors, list) or len(factors) != count:
            given = f"{len(factors)} numbers" if isinstance(factors, list) else repr(factors)
            raise ValueError(f"rope_parameters {key} has to be a list of {count} numbers, not {given}")


# --- layers that differ


class LayerTypesConfig(RotaryConfig):
    """A family whose layers differ in what they attend to, one name each in `layer_types`."""

    layer_types: list[LayerType] | None = None

    @field_validator("layer_types", mode="before")
    @classmethod
    def rename(cls, layer_types: Any) -> Any:
        """`attention` is what transformers 4 called `full_attention` (configuration_utils.py)."""
        if not isinstance(layer_types, list):
            return layer_types
        return ["full_attention" if kind == "attention" else kind for kind in layer_types]

    @model_validator(mode="after")
    def check_layer_types(self) -> LayerTypesConfig:
        layers: int = getattr(self, "num_hidden_layers")
        if self.layer_types is not None and len(self.layer_types) != layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries, num_hidden_layers is {layers}")
        return self


def repeats_after(kinds: Sequence[str]) -> int | None:
    """After how many layers a stack of these kinds repeats from its start; None if it does not within its depth."""
    for period in range(1, max(len(kinds), 2)):
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
            return period
    return None
