"""Collectives. Payload is the full tensor, wire the bytes that one GPU sends for it (nccl-tests,
doc/PERFORMANCE.md)."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from memcalc.core.rows import Basis
from memcalc.layout.layer_kinds import LaterShares, Shares

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast", "reduce"]
Overlap = Literal["exposed", "forward", "backward"]
"""The phase whose compute can hide a collective; "exposed" if none can."""

# The bytes that one of n ranks sends: factor · (n - 1) / n of the payload; None means the payload itself.
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
    """`calls` calls of one kind per optimizer step, equal or not, with `payload` bytes in total."""

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
    """The number of the rank's layers that send the collective, if layers send it."""
    shares: Shares | LaterShares | None = None
    """Each layer's share of the payload, if it is parameters or gradients."""
    once: bool = False
    """True if a layer sends the collective once per step, whatever the number of micro-batches."""
    each: str = ""
    """The payload of one call of one layer, in named dims."""
    basis: Basis = "modelled"
    source: str = ""
    overlap: Overlap = "exposed"
    tail: int = 0
    """The payload of calls that begin when nothing is left to compute in the phase: no kernel hides them."""
    apart: int | None = None
    """The distance of two neighbours of the group in rank order, if the axis does not say it."""

    @property
    def wire(self) -> int:
        """Return the bytes that this rank sends."""
        return wire_bytes(self.collective, self.group_size, self.payload)


def wire_bytes(collective: str, group_size: int, payload: int) -> int:
    """Return the bytes that one of `group_size` ranks sends for a payload: 0 for a group of one."""
    if group_size == 1:
        return 0
    factor = _FACTOR[collective]
    return payload if factor is None else factor * (group_size - 1) * payload // group_size
