"""The part of a setup that a configuration file says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

ACCUMULATION: Final = "gradient_accumulation_steps"
"""The micro-batches of a step, which no option has: with the data-parallel degree they make `global_batch_size`."""
REPLICAS: Final = "replicas"
"""The groups of ranks that each have all shards, which no option has: with the GPUs they make `shard_group`."""


class Value(NamedTuple):
    """A value, and where it was found."""

    value: Any
    where: str
    """The file and its key: "ds.json: zero_optimization.stage"."""
    is_given: bool = True
    """False: the tool's default for a key that the file does not have. What another file gives is used before it."""


@dataclass(frozen=True)
class Found:
    """The content of one file in memcalc's words. `None` as a value of a default says nothing."""

    options: Mapping[str, Value]
    """Setup options by their Python names, `ACCUMULATION` and `REPLICAS`."""
    model: Value | None = None
    """The model that the file names, as `load_model` takes it."""
    files: Mapping[str, Value] = field(default_factory=lambda: dict[str, Value]())
    """The files of other formats that the file names or holds: a path as seen from the file, or a mapping, by the option
    that takes it (`deepspeed`, `accelerate`)."""
    notes: tuple[str, ...] = ()
    """A sentence for each key that matters and is not modelled: the key, and what is assumed instead."""
