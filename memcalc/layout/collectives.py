"""Collectives: payload is the full tensor, wire is what one GPU sends for it (nccl-tests, doc/PERFORMANCE.md)."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from memcalc.core.rows import Basis
from memcalc.layout.layer_kinds import Shares

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast", "reduce"]
Overlap = Literal["exposed", "forward", "backward"]
"""What the engine lets a collective hide behind: that phase's compute, or nothing."""

# Bytes that one GPU sends for n ranks: factor · (n - 1) / n of the payload; None: the payload itself.
_FACTOR: Final[dict[str, int | None]] = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "send": None,
    "broadcast": None,
    "reduce": None,
}


class Collective(NamedTuple):
    """`calls` equal or unequal calls of one kind per optimizer step, `payload` bytes in all."""

    axis: str
    collective: Kind
    name: str
    phase: str
    dtype: str
    group_size: int
    calls: int
    payload: int
    formula: str
    layer: str | None = None
    layers: int = 0
    """How many of the rank's layers send it, where layers do."""
    shares: Shares | None = None
    """What of it each layer has, where the payload is parameters or gradients."""
    once: bool = False
    """True if a layer sends it once a step, however many micro-batches that has."""
    each: str = ""
    """One call of one layer, in named dims."""
    basis: Basis = "modelled"
    source: str = ""
    overlap: Overlap = "exposed"

    @property
    def wire(self) -> int:
        """Bytes that this rank sends."""
        return wire_bytes(self.collective, self.group_size, self.payload)


def wire_bytes(collective: str, group_size: int, payload: int) -> int:
    """Bytes that one of `group_size` ranks sends for a payload (0 for a group of one)."""
    if group_size == 1:
        return 0
    factor = _FACTOR[collective]
    return payload if factor is None else factor * (group_size - 1) * payload // group_size
