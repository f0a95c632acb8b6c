"""The reading of a family's `config.json`: strict, frozen, bounded.

A field that is left out has transformers' own default for that `model_type`. A field that memcalc does not know is
ignored, as in transformers, unless it would change what is computed. Such fields are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    cast,
    get_args,
    get_type_hints,
)

from memcalc.errors import quoted

if TYPE_CHECKING:
    from pydantic import BaseModel


class Bounds(NamedTuple):
    """The range of a field, as pydantic's core takes it."""

    ge: float | None = None
    le: float | None = None
    lt: float | None = None
    gt: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), **{key: bound for key, bound in self._asdict().items() if bound is not None}}


Count = Annotated[int, Bounds(ge=1, le=10**7)]
"""A dim of the architecture. The bound only catches nonsense: no published model has a dim of ten million."""

Several = Annotated[int, Bounds(ge=2, le=10**7)]
"""A dim that torch.einsum contracts. If it is one, einsum takes another way that is not written out."""

CountOrNone = Annotated[int, Bounds(ge=0, le=10**7)]
"""A dim whose value 0 means that there is none."""

Labels = Annotated[int, Bounds(ge=2, le=10**7)]
"""The labels of a classifier. One label is a regression, which has another loss."""

Layers = Annotated[int, Bounds(ge=1, le=10**4)]
Probability = Annotated[float, Bounds(ge=0, lt=1)]
Fraction = Annotated[float, Bounds(gt=0, le=1)]


class NoInteger:
    """Refuses integers, for a number that transformers takes as 1.0 but not as 1."""

    @staticmethod
    def check(value: Any) -> Any:
        if isinstance(value, int):
            raise ValueError(f"it should be a number with a decimal point, as {float(value)}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(self.check, handler(source))


Decimal = Annotated[float, NoInteger()]
DecimalProbability = Annotated[Probability, NoInteger()]

Activation = Literal[
    "gelu", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh",
    "hardswish", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "swish",
    "tanh",
]  # fmt: skip
"""The names in transformers' ACT2FN that `blocks.act` has."""

LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = get_args(LayerType)

_REFUSED: Mapping[str, Sequence[Any]] = {
    "is_causal": (True,),
    "loss_type": (None, "ForCausalLM"),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
    "per_layer_config": (None,),
}
"""Fields that change the program of every family, with the values that leave it as it is written here."""


_LAYER_TYPES = (
    "chunked_attention", "compressed_sparse_attention", "conv", "full_attention", "heavily_compressed_attention", "hybrid",
    "hybrid_sliding", "indexed_attention", "linear_attention", "minimax_m3_sparse", "moe",
    "reference_sliding_attention", "sliding_attention", "window_attention",
)  # fmt: skip
"""The values that transformers takes in `layer_types`, even of types that do not read them (configuration_utils.py)."""


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """The fields of one `model_type`, with transformers' defaults.

    `read` checks what a user gives. A bundled model's fields are checked by the tests and read without checks, so that
    an estimate of a bundled model does not import pydantic.
    """

    refused: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Fields that would change this family's program, with the values that do not."""

    attribute_map: ClassVar[Mapping[str, str]] = {}
    """Other names that transformers' configuration class takes for a field."""

    computed: ClassVar[Sequence[str]] = ()
    """Fields that transformers' class computes from others: giving one fails, whatever the value."""

    given: ClassVar[Sequence[str]] = ()
    """Fields that may be left out but fail as null. If left out, most are computed from others; if given, they are
    taken as they are."""

    null_head_dim: ClassVar[bool] = True
    """True if `head_dim: null` counts as left out. It does not if transformers' class has no such field, and takes a
    given value as it is (`getattr(config, "head_dim", ...)`)."""

    pads_embedding: ClassVar[bool] = True
    """True if the embedding has a row for padding, where `pad_token_id` is a field and must be one of its rows."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ValueError if fields contradict each other."""

    def check_step(self) -> None:
        """Raise ValueError for a model that transformers builds but cannot run."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Return a configuration from a user's fields. Raises ValueError: the field, its value, what is allowed."""
        from pydantic import ValidationError

        try:
            checked = _pydantics(cls).model_validate(cls.renamed(config))
        except ValidationError as error:
            from memcalc.families.base.first_problem import first_problem

            raise ValueError(first_problem(error)) from None
        made = cls(**{field.name: getattr(checked, field.name) for field in fields(cls)})
        _check_unread(made, config)
        return made

    @classmethod
    def trusted(cls, config: Mapping[str, Any]) -> Self:
        """Return a configuration from fields that are known to be right."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in cls.renamed(config).items() if name in known})

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields under their names here. Raises ValueError for a field that is not modelled."""
        for name, allowed in {**_REFUSED, **cls.refused}.items():
            if name in config and not any(_same(config[name], value) for value in allowed):
                raise ValueError(
                    f"field `{name}` is {quoted(config[name])}, which is not modelled; allowed: {_listed(allowed)}"
                )
        for name in cls.computed:
            if name in config:
                raise ValueError(f"field `{name}` is given, which fails: transformers computes it from other fields")
        for name in cls.given:
            if name in config and config[name] is None:
                raise ValueError(f"field `{name}` is null; it should be a value or left out")
        named = dict(config)
        for other, name in cls.attribute_map.items():
            if other in named:
                value = named.pop(other)
                if not _same(named.setdefault(name, value), value):
                    raise ValueError(
                        f"{other} {quoted(value)} and {name} {quoted(named[name])} are one field with two values"
                    )
        return named


@cache
def _pydantics(of: type[FamilyConfig]) -> type[BaseModel]:
    """Return the model of pydantic's that checks the fields of a class. It takes longer to make than to use."""
    from pydantic import ConfigDict, create_model

    hints = get_type_hints(of, localns={"Mapping": Mapping, "Sequence": Sequence}, include_extras=True)
    known: dict[str, Any] = {f.name: (hints[f.name], ... if f.default is MISSING else f.default) for f in fields(of)}
    return create_model(of.__name__, __config__=ConfigDict(strict=True, extra="ignore"), **known)


def _same(left: object, right: object) -> bool:
    """Tell whether two values are equal and of one type: 1 is neither 1.0 nor true."""
    return left == right and type(left) is type(right)


def _check_unread(made: FamilyConfig, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a field that transformers checks even if the type does not read it."""
    token = config.get("pad_token_id")
    if type(token) not in (int, type(None)):
        raise ValueError(f"field `pad_token_id` is {quoted(token)}; it should be an integer or null")
    vocab: int = getattr(made, "vocab_size", 0)
    padding_idx: int | None = getattr(made, "pad_token_id", None) if made.pads_embedding else None
    if padding_idx is not None and not -vocab <= padding_idx < vocab:
        raise ValueError(f"pad_token_id {padding_idx} is not one of the {vocab} tokens of vocab_size")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name), dict | None):
            raise ValueError(f"field `{name}` is {quoted(config[name])}; it should be an object or null")
    tied = config.get("tie_word_embeddings", False)
    if type(tied) is not bool and all(field.name != "tie_word_embeddings" for field in fields(made)):
        raise ValueError(f"field `tie_word_embeddings` is {quoted(tied)}; it should be a valid boolean")
    _check_head_dim(made, config)
    kinds = config.get("layer_types")
    if kinds is None or hasattr(made, "layer_types"):
        return
    layers = getattr(made, "num_hidden_layers", None) or getattr(made, "n_layer", None)
    known = isinstance(kinds, list) and all(kind in _LAYER_TYPES for kind in cast("list[Any]", kinds))
    if not known or len(cast("list[Any]", kinds)) != layers:
        wanted = f"null or a list of {layers} of {', '.join(_LAYER_TYPES)}"
        raise ValueError(f"field `layer_types` is {quoted(cast('object', kinds))}; it should be {wanted}")


def _check_head_dim(made: FamilyConfig, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a wrong `head_dim` where it is no field: rotary frequencies and their validation read it
    even there."""
    if "head_dim" not in config:
        return
    given = config["head_dim"]
    if given is None:
        if not made.null_head_dim:
            raise ValueError("field `head_dim` is null; it should be a number or left out")
        return
    if any(field.name == "head_dim" for field in fields(made)):
        return
    if type(given) is not int or given < 1 or given % 2:
        raise ValueError(f"field `head_dim` is {quoted(given)}; it should be an even number or null")
    if isinstance(made, RotaryConfig) and made.reads_head_dim and given != made.width_of_head:
        raise ValueError(f"head_dim {given} has to be the {made.width_of_head} dims that a head has")


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(repr(value) for value in values)


def check_divides(config: FamilyConfig, whole: str, part: str) -> None:
    """Raise ValueError unless field `part` (if given) divides field `whole`."""
    total, divisor = getattr(config, whole), getattr(config, part)
    if divisor is not None and total % divisor:
        raise ValueError(f"{whole} {total} is not divisible by {part} {divisor}")


# --- rotary positions (modeling_rope_utils.py)

_ROPE_KEYS: Mapping[str, Sequence[str]] = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
"""The parameters that each kind of rotary scaling needs besides those that transformers fills in."""


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(FamilyConfig):
    """A family with rotary positions. `rope_scaling` is the name of `rope_parameters` before transformers 5."""

    rotates_part: ClassVar[bool] = False
    """True if the program does not rotate the rest of a head where `partial_rotary_factor` is below 1."""

    reads_head_dim: ClassVar[bool] = True
    """True if a `head_dim` beside the other fields changes the frequencies."""

    hidden_size: Count
    num_attention_heads: Count
    pad_token_id: int | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = 10000.0
    partial_rotary_factor: Fraction | None = None

    @property
    def rope(self) -> dict[str, Any]:
        """Return the rotary parameters of shapes (RotaryEmbeddingConfigMixin.convert_rope_params_to_dict)."""
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
        return head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_width(self) -> int:
        """Return the number of rotated dims of a head."""
        return int(self.width_of_head * self.rope["partial_rotary_factor"]) if self.rotates_part else self.width_of_head

    def check(self) -> None:
        super().check()
        rope = self.rope
        nested = [key for key in rope if isinstance(rope[key], dict)]
        if nested:
            raise ValueError(f"rope_parameters by layer type ({nested[0]}) are not read here; allowed: one set for all")
        self.check_rope(rope)

    def check_step(self) -> None:
        super().check_step()
        if self.rotary_width % 2:
            width = f"{self.rotary_width} rotated dims of a head (head_dim {self.width_of_head})"
            raise ValueError(f"{width} are not an even number; allowed: a partial_rotary_factor that leaves one")

    rotation_is_optional: ClassVar[bool] = False
    """True if a `rope_theta` of null turns the rotation off."""

    def check_rope(self, rope: Mapping[str, Any]) -> None:
        """Raise ValueError if one set of rotary parameters contradicts itself."""
        kind, factor = rope["rope_type"], rope["partial_rotary_factor"]
        if not isinstance(kind, str) or kind not in _ROPE_KEYS:
            raise ValueError(f"rope_parameters rope_type {kind!r} is not known; allowed: {_listed(tuple(_ROPE_KEYS))}")
        for key in _ROPE_KEYS[kind]:
            if key not in rope:
                raise ValueError(f"rope_parameters of rope_type {kind!r} lack {key!r}")
        _check_rope_numbers(rope)
        if not _is_number(factor) or not 0 < factor <= 1:
            raise ValueError(f"partial_rotary_factor {factor!r} is not a number above 0 and up to 1")
        if factor != 1 and kind != "default" and not self.rotates_part:
            raise ValueError(f"partial_rotary_factor {factor!r} fails with rope_type {kind!r}; allowed: 1.0")
        theta = rope.get("rope_theta", self.rope_theta)
        left_out = self.rotation_is_optional and "rope_theta" in rope and rope["rope_theta"] is None
        if not left_out and (not _is_number(theta) or not theta > 1):
            raise ValueError(f"rope_theta {quoted(theta)} is not a number above 1")
        width = self.rotary_width
        if width < 2 or (width % 2 and width == self.width_of_head):  # an odd part of a head is built, but cannot run
            raise ValueError(f"{width} rotated dims of a head (head_dim {self.width_of_head}) are not an even number")
        if kind == "dynamic" and width == 2:
            heads = f"2 rotated dims of a head (head_dim {self.width_of_head})"
            raise ValueError(f"{heads} divide by zero with rope_type 'dynamic'; allowed: 4 and more")
        if kind == "longrope":
            _check_factors(rope, width // 2)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


_ROPE_NUMBERS: Mapping[str, bool] = {
    "factor": False, "low_freq_factor": False, "high_freq_factor": False, "original_max_position_embeddings": False,
    "attention_factor": True, "beta_fast": True, "beta_slow": True, "mscale": True, "mscale_all_dim": True,
}  # fmt: skip
"""The numbers of the computation; True if null stands for a default. Those may also be zero."""


def _check_rope_numbers(rope: Mapping[str, Any]) -> None:
    for key, optional in _ROPE_NUMBERS.items():
        may_be_null = optional or (key == "factor" and rope["rope_type"] == "yarn")
        if key not in rope or (rope[key] is None and may_be_null):
            continue
        value: Any = rope[key]
        if not _is_number(value) or value < 0 or (value == 0 and not optional):
            raise ValueError(f"rope_parameters {key} {quoted(value)} is not a number above 0")


def _check_factors(rope: Mapping[str, Any], count: int) -> None:
    for key in ("short_factor", "long_factor"):
        if not isinstance(rope[key], list):
            raise ValueError(f"rope_parameters {key} {rope[key]!r} has to be a list of {count} numbers")
        factors = cast("list[Any]", rope[key])
        if len(factors) != count or not all(_is_number(factor) and factor > 0 for factor in factors):
            raise ValueError(f"rope_parameters {key}: {len(factors)} factors; they have to be {count} numbers above 0")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(RotaryConfig):
    """The fields that Llama and its relatives have in common. Each family gives its own defaults."""

    vocab_size: Count
    intermediate_size: Count
    num_hidden_layers: Layers
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count
    attention_dropout: Probability = 0.0
    tie_word_embeddings: bool = False

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
