"""Sizes that a configuration leaves out: transformers takes its defaults for them, which are those of one published model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from memcalc.families.config import FamilyConfig

_NO_SIZES: Final = (
    "relative_attention_max_distance", "no_rope_layer_interval", "sliding_window", "max_window_layers",
)  # fmt: skip
_LENGTH: Final = "max_position_embeddings"


def left_out(config: Mapping[str, Any], made: FamilyConfig, *, learns_positions: bool) -> dict[str, int]:
    """The fields with sizes that `config` has not, with the defaults that were taken.

    What transformers saves has all of them. Numbers of tokens are no sizes, nor is a default of 0 or 1, which stands for the
    lack of a thing; nor is the length of a model whose positions are not learned.
    """
    given = type(made).renamed(config)
    return {
        field.name: field.default
        for field in fields(made)
        if type(field.default) is int
        and field.default > 1
        and field.name not in given
        and field.name not in _NO_SIZES
        and not field.name.endswith("_token_id")
        and (learns_positions or field.name != _LENGTH)
    }


def note(model_type: str, sizes: Mapping[str, int]) -> str:
    """A sentence that names them."""
    listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return f"the configuration leaves out {listed}: these are transformers' defaults for {model_type}"
