"""The events that a run notes for an engine that acts between them: modules that begin and end, gradients that are ready.

A run on paper is recorded once. An engine is played over it later (`memcalc/tape/rewritten.py`), with any number of ranks
and any threshold, because all that it looks at is here.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Where = tuple[str, int | None]
"""A module: its path, and its layer where that has a `*`."""


class Visited(NamedTuple):
    """One call of a module."""

    where: Where
    parameters: frozenset[int]
    """Those that are gathered for it, by their place in definition order. A leaf's are those of the modules in it too."""
    within: frozenset[int]
    """Its own and those of all modules in it."""
    is_leaf: bool


class Selective(NamedTuple):
    """The call of a checkpoint that keeps some results."""

    number: int
    module: Where | None
    """The module that is checkpointed."""
    again: bool
    """Whether it is being recomputed."""


class Begins(NamedTuple):
    """A module begins."""

    place: int
    """In the log: the event comes before what is logged there."""
    segment: int
    """The segment of the log that it is in, by its number."""
    visited: Visited
    forward: bool
    phase: Literal["forward", "backward"]
    """A module that is recomputed begins its forward in backward."""
    within: Selective | None
    sent: int
    """How many collectives the run itself has sent before."""


class Ends(NamedTuple):
    """A module is over."""

    place: int
    segment: int
    visited: Visited
    forward: bool
    sent: int


class Ready(NamedTuple):
    """A gradient is ready: from `after` on its block goes on under the number `block`, as none of autograd's."""

    place: int
    segment: int
    after: int
    block: int
    parameter: int
    sent: int


class Holds(NamedTuple):
    """From here on the graph refers to the memory that a parameter has been gathered into, if it has been."""

    place: int
    segment: int
    number: int
    parameter: int


class LetsGo(NamedTuple):
    """It does so no more."""

    place: int
    segment: int
    number: int


class Over(NamedTuple):
    """Backward is over."""

    place: int
    segment: int
    sent: int


Event = Begins | Ends | Ready | Holds | LetsGo | Over


class Noted(NamedTuple):
    """The events of one step in their order."""

    weights: tuple[Where, ...]
    """The name and the layer of each parameter, in definition order."""
    elements: tuple[int, ...]
    events: tuple[Event, ...]
