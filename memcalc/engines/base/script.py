"""The allocations and frees of an engine around forward and backward: block by block, in the order of its own code."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple

DEFAULT: Final = "default"
"""The stream that a model runs on."""


class Event(NamedTuple):
    """A block is allocated or, without bytes, freed. Without a block, free segments are given back to the device
    (`empty_cache`)."""

    block: Hashable | None
    nbytes: int | None = None
    stream: str = DEFAULT


class Script:
    """A script that is being written."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def comes(self, block: Hashable, nbytes: int, stream: str = DEFAULT) -> None:
        self.events.append(Event(block, nbytes, stream))

    def goes(self, *blocks: Hashable) -> None:
        self.events += [Event(block) for block in blocks]

    def passes(self, block: Hashable, nbytes: int, stream: str = DEFAULT) -> None:
        """Allocate a block and free it."""
        self.comes(block, nbytes, stream)
        self.goes(block)

    def empties_cache(self) -> None:
        self.events.append(Event(None))


class Scripts(NamedTuple):
    """The scripts of a whole process. Blocks are identified by names; a name refers to one block at a time."""

    before_first_step: list[Event]
    """Events before the first step."""
    before_first_step_through_cpu: list[Event]
    """Events before the first step if the device has no room for those of `before_first_step`."""
    backward: list[Event]
    """Events when a backward begins. Blocks allocated here are freed when it ends."""
    closing: list[Event]
    """Events after the last backward of a step."""
    step: list[Event]
    first_step: list[Event]
    """Events of the first step, which allocates the optimizer's states; these stay."""
    stays: frozenset[str] = frozenset()
    """The names of a run's blocks that are alive after it; those of the first micro-batch."""
    gradients: tuple[Hashable, ...] = ()
    """The names of the gradients that a run leaves, in their order."""
