"""A part of an accelerate configuration that is written: the keys of one way of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup


@dataclass(frozen=True)
class Part:
    """Keys of the file, sections among them, and what they mean."""

    keys: Mapping[str, Any]
    said: frozenset[str]
    """The options that they say."""
    takes: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Values that accelerate takes for other options, where these are not memcalc's defaults."""
    why: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """Reasons for what they cannot say."""


def mixed(setup: Setup, kind: str) -> Part:
    """Return the mixed precision. `kind` is how the engine has it: "autocast", "mixed". Other precisions are "no": weights have
    the dtype that the script loads them in."""
    half, _, own = setup.precision.partition("-")
    if half == "fp32":
        return Part({"mixed_precision": "no"}, frozenset({"precision"}))
    if own == kind:
        return Part({"mixed_precision": half}, frozenset({"precision"}))
    why = "without mixed_precision weights have the dtype that the script loads, and the script keeps any fp32 copies"
    return Part({"mixed_precision": "no"}, frozenset(), {"precision": "fp32"}, {"precision": why})


def degrees(**sizes: int) -> dict[str, Any]:
    """Return the keys of a parallelism_config for the degrees above 1."""
    return {f"parallelism_config_{name}": size for name, size in sizes.items() if size > 1}


def joined(*parts: Part) -> Part:
    """Return all parts as one; a later one's keys follow."""
    return Part(
        {key: value for part in parts for key, value in part.keys.items()},
        frozenset(name for part in parts for name in part.said),
        {name: value for part in parts for name, value in part.takes.items()},
        {name: why for part in parts for name, why in part.why.items()},
    )
