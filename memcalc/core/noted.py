"""The events that a run records for an engine that acts between them: a module begins or ends, a gradient is ready.

A run on paper is recorded once. An engine is played over the record later (`memcalc/tape/rewritten.py`), with any
number of ranks and any threshold, because everything that it looks at is in the events.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Where = tuple[str, int | None]
"""A module: its path, and its layer if the path has a `*`."""


class Visited(NamedTuple):
    """One call of a module."""

    where: Where
    parameters: frozenset[int]
    """The parameters that are gathered for the call, by their index in definition order. A leaf gathers the parameters
    of the modules inside it too."""
    within: frozenset[int]
    """The module's own parameters and those of all modules inside it."""
    is_leaf: bool


class Selective(NamedTuple):
    """The call of a checkpoint that keeps the results of some ops."""

    number: int
    module: Where | None
    """The module that is checkpointed."""
    again: bool
    """True while the call is being recomputed."""


class Begins(NamedTuple):
    """A module begins."""

    place: int
    """The event's index in the log: it comes before the entry at this index."""
    segment: int
    """The number of the log's segment that the event is in."""
    visited: Visited
    forward: bool
    phase: Literal["forward", "backward"]
    """The phase of the run. A module that is recomputed begins its forward in "backward"."""
    within: Selective | None
    sent: int
    """The number of collectives that the run itself has sent before the event."""


class Ends(NamedTuple):
    """A module ends."""

    place: int
    segment: int
    visited: Visited
    forward: bool
    sent: int


class Ready(NamedTuple):
    """A gradient is ready. From index `after` on its block belongs to no node of autograd and has the number
    `block`."""

    place: int
    segment: int
    after: int
    block: int
    parameter: int
    sent: int


class Holds(NamedTuple):
    """From this event on the graph refers to the block that a parameter has been gathered into, if it has been
    gathered."""

    place: int
    segment: int
    number: int
    parameter: int


class LetsGo(NamedTuple):
    """From this event on the graph no longer refers to the block of the `Holds` with the same number."""

    place: int
    segment: int
    number: int


class Over(NamedTuple):
    """Backward ends."""

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
