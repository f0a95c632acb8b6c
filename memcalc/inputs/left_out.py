"""Sizes that a configuration leaves out. transformers uses its defaults for them, which are those of one published
model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from memcalc.families.base.config import FamilyConfig

_NO_SIZES: Final = (
    "relative_attention_max_distance", "no_rope_layer_interval", "sliding_window", "max_window_layers",
)  # fmt: skip
_LENGTH: Final = "max_position_embeddings"


def left_out(config: Mapping[str, Any], made: FamilyConfig, *, learns_positions: bool) -> dict[str, object]:
    """Return the size fields that `config` lacks, with the defaults that are used.

    Configurations saved by transformers have all of them. Some fields are no sizes: numbers of tokens, a default of 0
    or 1, which stands for the lack of a thing, and the length of a model whose positions are not learned.
    """
    given = type(made).renamed(config)
    return {
        field.name: field.default
        for field in fields(made)
        if _is_size(field.default)
        and field.name not in given
        and field.name not in _NO_SIZES
        and not field.name.endswith("_token_id")
        and (learns_positions or field.name != _LENGTH)
    }


def _is_size(default: object) -> bool:
    """Tell whether a default is an integer above 1, or several integers."""
    if isinstance(default, tuple):
        return (
            all(type(one) is int for one in cast("tuple[object, ...]", default))
            and len(cast("tuple[object, ...]", default)) > 1
        )
    return type(default) is int and default > 1


_NAMES_OF_SIZES: Final = r"hidden|width|layers?$|depth|dim$|d_model|n_embd|channels|vocab|heads|size$"
"""Matches the size fields of a type without a program of its own."""


def note_of_unknown(model_type: str, config: Mapping[str, Any]) -> str | None:
    """Return a sentence if the configuration of such a type gives no size at all; None otherwise."""
    if any(re.search(_NAMES_OF_SIZES, name) and isinstance(value, int | list) for name, value in config.items()):
        return None
    return f"the configuration gives no sizes: all are transformers' defaults for {model_type}"


def note(model_type: str, sizes: Mapping[str, object]) -> str:
    """Return a sentence that names the left-out sizes."""
    listed = ", ".join(
        f"{name} {' '.join(map(str, cast('tuple[object, ...]', size))) if isinstance(size, tuple) else size}"
        for name, size in sizes.items()
    )
    return f"the configuration leaves out {listed}: these are transformers' defaults for {model_type}"
