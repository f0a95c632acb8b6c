"""A step of a pipeline's rank that is written action by action, in parts that can be written again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from memcalc.core.tensor import Memory, Sent, StorageRow, Streamed, Work
    from memcalc.engines.fsdp2.pipeline_step import PaperStage

Name = tuple[int, int]
"""A block of a micro-batch: the number of the action that has allocated it, and its number within the action."""


NEW: Final = -1
"""Stands in a name for the action itself, if the micro-batch does not have the block."""


class Part(NamedTuple):
    """The part of a log that an action has written, with the number of a block counted from its first one."""

    log: list[int]
    freed: list[tuple[int, Name | int]]
    """The places in `log` that free an earlier block: one of the micro-batch by its name, or one by its place in `held`."""
    rows: list[StorageRow]
    segments: list[tuple[int, str, int | None]]
    renamed: list[int]
    ends: list[int]
    sent: list[Sent]
    work: list[Work]
    streamed: list[Streamed]
    stays: list[tuple[Name, int]]
    """The blocks that the micro-batch keeps, with their numbers in this part."""
    past: int
    """The number of what the micro-batch has been through then."""
    held: list[Name | int | None]
    """The block in each place behind the action: a new one by its name, or one that was there by its place."""
    rest: Hashable
    at: tuple[str, int | None, str]
    loss: Name | None
    is_known: bool
    """False if it touches a block of which nothing is known: it cannot be written."""
    sent_once: list[Sent]
    """The collectives of a step's one reduction."""


class Written:
    """A run that is written, as `Memory` has one."""

    def __init__(self, memory: Memory) -> None:
        self.log, self.rows, self.segments = list(memory.log), list(memory.rows), list(memory.segments)
        self.renamed, self.sent, self.work = set(memory.renamed), list(memory.sent), list(memory.work)
        self.streamed = list(memory.streamed)
        self.ends: list[int] = []
        self.sent_once: list[Sent] = []

    def write(self, part: Part, freed: Iterable[tuple[int, int]]) -> int:
        """Write a part. `freed` are the earlier blocks that it frees, with the places in its log. Return the number of its
        first block."""
        place, first = len(self.log), len(self.rows)
        events = [event + first if event >= 0 else event - first for event in part.log]
        for where, block in freed:
            events[where] = ~block
        self.log += events
        self.rows += part.rows
        self.segments += [(place + where, phase, layer) for where, phase, layer in part.segments]
        self.renamed.update([place + where for where in part.renamed])
        self.ends += [place + where for where in part.ends]
        self.sent += part.sent
        self.work += part.work
        self.streamed += part.streamed
        return first


def written(memory: Memory, stages: Iterable[PaperStage]) -> Written:
    """Return a run whose actions have all run."""
    out = Written(memory)
    for stage in stages:
        out.ends += stage.forward_ends
        out.sent_once += stage.sent_once
    return out
