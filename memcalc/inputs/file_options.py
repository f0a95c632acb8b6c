"""The options that take other tools' configuration files (memcalc.formats)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

FILES: Final = ("training_args", "accelerate", "deepspeed", "torchtitan", "megatron_args", "layers")
"""By their Python names; each takes a path or the parsed mapping."""


@dataclass(frozen=True)
class FromFiles:
    """The part of a setup that files said."""

    origins: Mapping[str, str]
    """Where each option's value came from: "ds.json: zero_optimization.stage". An option that was given is not here."""
    notes: tuple[str, ...]
