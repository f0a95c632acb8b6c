"""The timeline of a step: every block with its name, its place in memory and its life. All pictures read it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.rows import COMPONENTS
from memcalc.pictures.labels import ALLOCATOR

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

DRAWN: Final = (*COMPONENTS, ALLOCATOR)
"""The components of a timeline, in the order in which they are stacked."""


class Block(NamedTuple):
    """A block of memory. It is alive from moment `begin` up to moment `end`, without that one."""

    name: str
    component: str
    nbytes: int
    """The bytes that were asked for."""
    size: int
    """The bytes that the allocator takes: rounded up, and with a rest that it does not split off."""
    begin: int
    """0 if the block is from before the step."""
    end: int | None
    """None if the block is alive when the step is over."""
    stream: str
    address: int
    micro_batch: int | None
    """The number of the micro-batch whose forward or backward allocates the block; None outside these."""
    phase: str
    """The phase that allocates the block: "forward", "backward" or "step"; "" before the step."""


class Span(NamedTuple):
    """A part of the step, from moment `first` to moment `last`."""

    phase: str
    micro_batch: int | None
    """None for a run of several micro-batches, and in the optimizer's step."""
    chunk: int
    layer: int | None
    """The layer, in a part that runs one layer."""
    first: int
    last: int


class Segment(NamedTuple):
    """A range of addresses that the allocator has reserved. `begin` and `end` are moments, as of a block."""

    address: int
    size: int
    stream: str
    begin: int
    end: int | None


class Timeline(NamedTuple):
    """A step of one rank, in moments. Moment 0 is the begin of the step; each allocation or free leads to the next moment."""

    blocks: tuple[Block, ...]
    """All blocks, in the order in which they are allocated."""
    spans: tuple[Span, ...]
    """The forwards and backwards of the step in their order, and the optimizer's step."""
    parts: tuple[Span, ...]
    """The parts of these spans: each runs one layer, or what is before, between and after the layers."""
    segments: tuple[Segment, ...]
    events: int
    """The number of allocations and frees: the number of the last moment."""
    peak_event: int
    """The first moment with the most bytes."""
    peak: int
    """The bytes alive at that moment, as torch.cuda.max_memory_allocated counts them."""
    capacity: int | None
    """The bytes of the GPU; None without one."""
    rank: int
    """The pipeline rank."""
    notes: tuple[str, ...] = ()
    """Sentences about parts that the timeline leaves out, and about differences from the report's table."""

    @property
    def layers(self) -> tuple[Span, ...]:
        """Return the parts that run one layer each."""
        return tuple(part for part in self.parts if part.layer is not None)

    def alive_at(self, moment: int) -> list[Block]:
        """Return the blocks that are alive at a moment, the largest first."""
        alive = [one for one in self.blocks if one.begin <= moment and (one.end is None or moment < one.end)]
        return sorted(alive, key=lambda one: -one.size)

    def live(self) -> dict[str, list[int]]:
        """Return by component the bytes alive at every moment. A tensor counts with the bytes that were asked for; what the
        allocator adds to each block counts as "allocator", so that all components add up to what is allocated."""
        changes = {component: [0] * (self.events + 1) for component in DRAWN}
        for block in self.blocks:
            for component, nbytes in ((block.component, block.nbytes), (ALLOCATOR, block.size - block.nbytes)):
                change = changes[component]
                change[block.begin] += nbytes
                if block.end is not None:
                    change[block.end] -= nbytes
        return {component: list(accumulate(change)) for component, change in changes.items()}

    def allocated(self) -> list[int]:
        """Return the bytes that are allocated at every moment."""
        return _alive(self.events, self.blocks)

    def reserved(self) -> list[int]:
        """Return the bytes that the allocator has reserved at every moment."""
        return _alive(self.events, self.segments)


def _alive(events: int, parts: Iterable[Block | Segment]) -> list[int]:
    change = [0] * (events + 1)
    for part in parts:
        change[part.begin] += part.size
        if part.end is not None:
            change[part.end] -= part.size
    return list(accumulate(change))


def timeline_of(report: Report) -> Timeline:
    """Return the timeline of the last step of a report's rank, played as `report.allocated` is.

    Raise InputError if the order of its allocations is not known.
    """
    from memcalc.errors import InputError
    from memcalc.pictures.recorder import recorded

    if report.states_only:
        raise InputError("--params: a timeline needs the step of a model; allowed: --model in the place of --params")
    if not report.is_played:
        raise InputError(f"{_setup_words(report)}: the order of the allocations is not known, so there is no timeline")
    return recorded(report)


def _setup_words(report: Report) -> str:
    setup = report.setup
    words = [f"--engine {setup.engine}"]
    words += [
        f"--{name} {getattr(setup, name)}" for name in ("zero", "tp", "pp", "cp", "ep") if getattr(setup, name) > 1
    ]
    words += [f"--schedule {setup.schedule}"] if setup.pp > 1 else []
    return " ".join(words)
