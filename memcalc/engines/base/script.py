"""What an engine allocates and frees by itself, around forward and backward: block by block, in the order of its own code."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple

DEFAULT: Final = "default"
"""The stream that a model runs on."""


class Event(NamedTuple):
    """A block comes or, without bytes, goes. No block at all: free segments are given back to the device (`empty_cache`)."""

    block: Hashable | None
    nbytes: int | None = None
    stream: str = DEFAULT


class Script:
    """One that is being written."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def comes(self, block: Hashable, nbytes: int, stream: str = DEFAULT) -> None:
        self.events.append(Event(block, nbytes, stream))

    def goes(self, *blocks: Hashable) -> None:
        self.events += [Event(block) for block in blocks]

    def passes(self, block: Hashable, nbytes: int, stream: str = DEFAULT) -> None:
        """It comes and goes."""
        self.comes(block, nbytes, stream)
        self.goes(block)

    def empties_cache(self) -> None:
        self.events.append(Event(None))


class Scripts(NamedTuple):
    """Of a whole process. Blocks are told by their names; each name is that of one block at a time."""

    made: list[Event]
    """Before the first step."""
    made_outside: list[Event]
    """The same where the device has no room for it."""
    backward: list[Event]
    """When a backward begins; what comes goes when it has ended."""
    closing: list[Event]
    """When the last backward of a step has run."""
    step: list[Event]
    first_step: list[Event]
    """With the optimizer's states, which stay."""
    stays: frozenset[str] = frozenset()
    """Blocks of a run, by their names in it, that are still there when it has ended; those of the first micro-batch."""
    gradients: tuple[Hashable, ...] = ()
    """What the gradients that a run leaves are called here, in their order."""
