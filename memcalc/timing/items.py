"""The rows of a step's time."""

from __future__ import annotations

from typing import Literal, NamedTuple

Bound = Literal["flops", "bandwidth", "latency", "link"]
Part = Literal["forward", "backward", "recomputation", "optimizer", "communication", "bubble", "launch"]


class Timed(NamedTuple):
    """Equal kernels, or one collective, of an optimizer step."""

    name: str
    part: Part
    seconds: float
    """The seconds of all calls in a step."""
    hidden: float
    """The seconds of these during which the GPU computes something else."""
    bound: Bound
    calls: float
    formula: str
    basis: str
    source: str
