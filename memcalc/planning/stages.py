"""The least that a pipeline's stages need, from the time and the bytes of its layers."""

from __future__ import annotations

from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.engines.deepspeed import stages as deepspeed
from memcalc.megatron.schedules import actions, spans_of
from memcalc.pipelining.orders import steps
from memcalc.pipelining.programs import spans

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from memcalc.planning.layouts import Layout


_COMPUTES: Final = ("forward", "backward")


class Split(NamedTuple):
    """A model's layers, the given numbers of the first and the last chunk's, and the engine that divides the others."""

    layers: int
    first: int | None
    last: int | None
    engine: str

    def of_ranks(self, ranks: int, chunks: int) -> list[list[int]]:
        """Return the layers of each rank's chunks. Raise ValueError if they do not divide."""
        if self.engine == "deepspeed":
            return [[span.layers] for span in deepspeed.spans(self.layers, ranks)]
        divide = spans if self.engine == "fsdp2" else spans_of
        return [[span.layers for span in own] for own in divide(self.layers, ranks, chunks, self.first, self.last)]

    def steps(self, schedule: str, rank: int, ranks: int, chunks: int, many: int) -> Iterator[tuple[str, int]]:
        """Yield a rank's forwards and backwards, each with its chunk. Raise ValueError if the schedule does not take so many
        micro-batches."""
        if self.engine == "deepspeed":
            return ((one.kind, 0) for one in deepspeed.instructions(rank, ranks, many) if one.kind in _COMPUTES)
        order = steps if self.engine == "fsdp2" else actions
        return iter(order(schedule, rank, ranks, many, chunks))


class Least(NamedTuple):
    """The least of a quantity that each layer has."""

    window: float
    """In so many consecutive layers as a period of the stack has."""
    layer: float
    """In one layer."""
    period: int


class Layers(NamedTuple):
    """The layers of one or more chunks, or of micro-batches in flight: whole periods, and layers besides."""

    windows: int
    rest: int

    def least(self, of: Least) -> float:
        """Return the least that they have together."""
        return self.windows * of.window + self.rest * of.layer


def together(chunks: Iterable[int], period: int) -> Layers:
    """Return the layers of several chunks. A chunk may begin within a period."""
    parts = [divmod(layers, period) for layers in chunks]
    return Layers(sum(windows for windows, _ in parts), sum(rest for _, rest in parts))


class Stages(NamedTuple):
    """The layers of each pipeline rank, and of the first chunks of the ranks before it."""

    own: tuple[Layers, ...]
    ahead: tuple[Layers, ...]


@lru_cache(maxsize=65536)
def stages_of(split: Split, ranks: int, chunks: int, period: int) -> Stages:
    """Return the stages of a pipeline. Raise ValueError if the layers do not divide."""
    counts = split.of_ranks(ranks, chunks)
    ahead = (together((own[0] for own in counts[:rank]), period) for rank in range(ranks))
    return Stages(tuple(together(own, period) for own in counts), tuple(ahead))


def least_seconds(layout: Layout, split: Split, of: Least, head: float, many: int) -> float:
    """Return the least seconds of all forwards and backwards of a step of `many` micro-batches.

    Rank r begins after the first chunks of the ranks before it, and their backwards come after its last one. `of`: the
    seconds of a layer's forward and backward; `head`: those of what the last rank has besides layers.
    """
    stages = stages_of(split, layout.pp, layout.virtual_stages, of.period)
    last = layout.pp - 1
    return max(
        many * (own.least(of) + (head if rank == last else 0.0)) + ahead.least(of)
        for rank, (own, ahead) in enumerate(zip(*stages, strict=True))
    )


class InFlight(NamedTuple):
    """A pipeline rank: its layers, and those of all micro-batches that it has saved at once, at least."""

    own: Layers
    saved: Layers


@lru_cache(maxsize=65536)
def in_flight(split: Split, schedule: str, ranks: int, chunks: int, period: int, many: int) -> tuple[InFlight, ...]:
    """Return some ranks of a step of `many` micro-batches, before the first backward. Raise ValueError if the layers do not
    divide, or if the schedule does not take so many micro-batches."""
    stages, counts = stages_of(split, ranks, chunks, period), split.of_ranks(ranks, chunks)
    out: list[InFlight] = []
    for rank in sorted({0, min(1, ranks - 1), ranks // 2}):  # the first rank may have fewer layers than others
        begun = takewhile(lambda step: step[0] == "forward", split.steps(schedule, rank, ranks, chunks, many))
        out.append(InFlight(stages.own[rank], together((counts[rank][chunk] for _, chunk in begun), period)))
    return tuple(out)


def least_of(amounts: Sequence[float], period: int) -> Least:
    """Return the least of a quantity whose amount is given for each layer of a stack of this period."""
    windows = [sum(amounts[i : i + period]) for i in range(len(amounts) - period + 1)]
    return Least(min(windows, default=0.0), min(amounts, default=0.0), period)
