"""The actions of a pipeline rank."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Kind = Literal[
    "forward", "backward", "backward of inputs", "backward of weights",
    "send forward", "send backward", "unshard", "reshard", "reduce", "update",
]  # fmt: skip
COMPUTES: Final = ("forward", "backward", "backward of inputs", "backward of weights")


class Action(NamedTuple):
    """A part of one micro-batch's step in one of the rank's chunks, counted from 0. Without a micro-batch, it acts on a
    chunk's parameters."""

    kind: Kind
    chunk: int
    micro_batch: int | None


Step = tuple[Kind, int]
"""A kind of action and the rank's chunk."""
