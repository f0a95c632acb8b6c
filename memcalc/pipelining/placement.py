"""The places of a pipeline's stages: the stage of each chunk that a rank holds."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Placement = Literal["in rounds", "in a V", "both ways"]
"""In rounds: chunk c of rank r is stage c·ranks + r. In a V: the second chunks go back, from the last rank to the first.
Both ways: the second chunks are a second copy of the model, whose pipeline runs from the last rank to the first."""
TWO_CHUNKS: Final[tuple[Placement, ...]] = ("in a V", "both ways")


class Place(NamedTuple):
    """A stage of one of the pipelines. There are two of them if there are two copies of the model."""

    pipeline: int
    stage: int


def place(placement: Placement, rank: int, ranks: int, chunk: int) -> Place:
    """Return the place of a rank's chunk."""
    if placement == "in rounds" or chunk == 0:
        return Place(0, chunk * ranks + rank)
    return Place(0, 2 * ranks - 1 - rank) if placement == "in a V" else Place(1, ranks - 1 - rank)


def stages(placement: Placement, ranks: int, chunks: int) -> int:
    """Return the number of stages that a model is cut into."""
    return ranks if placement == "both ways" else ranks * chunks


def places(placement: Placement, rank: int, ranks: int, chunks: int) -> tuple[Place, ...]:
    """Return the places of all chunks of a rank."""
    return tuple(place(placement, rank, ranks, chunk) for chunk in range(chunks))
