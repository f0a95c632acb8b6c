"""A model with another number of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from memcalc.errors import InputError
from memcalc.inputs.model import from_config

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_FIELDS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TWO_STACKS: Final = ("encoder_layers", "decoder_layers", "num_decoder_layers")


def with_layers(model: Model, count: int) -> Model:
    """Return the model with `count` layers. A list with an entry for each layer keeps its first entries.

    Raise InputError for a model whose configuration has no single number of layers.
    """
    fields = _deepened(model, count)
    made = from_config(fields, model.name)
    if made.layers != count:
        raise InputError(f"--solve layers: {model.name} has no field for its number of layers; {_ALLOWED}")
    return made


_ALLOWED: Final = "allowed: a model with one stack of equal layers, or another quantity"


def _deepened(model: Model, count: int) -> Mapping[str, Any]:
    """Return the fields of the configuration with another number of layers."""
    fields = model.fields or {}
    two = [name for name in _TWO_STACKS if name in fields]
    if two:
        raise InputError(f"--solve layers: {model.name} has two stacks, an encoder and a decoder; {_ALLOWED}")
    named = [name for name in _FIELDS if name in fields]
    if len(named) > 1:
        raise InputError(f"--solve layers: {model.name} has both of {', '.join(named)}; {_ALLOWED}")
    depth = model.layers
    cut = {name: value[:count] for name, value in fields.items() if _is_by_layer(value, depth)}
    return {**fields, **cut, (named or _FIELDS)[0]: count}


def _is_by_layer(value: object, depth: int) -> bool:
    """Return True for a list with an entry for each layer."""
    return isinstance(value, list) and len(cast("list[object]", value)) == depth
