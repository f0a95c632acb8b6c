"""The parts of a pipeline that are alike: stages with the same layers, and ranks of which one is the fullest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from memcalc.engines.fsdp2.staged_rank import StagedRank
    from memcalc.pipelining.programs import Stage
    from memcalc.setup.setup import Setup


def fullest_of(setup: Setup, ranks: Sequence[StagedRank]) -> list[StagedRank]:
    """Return the ranks of which one has the highest peak, the first and the last among them.

    A rank that is neither and has the layers of the rank before it has fewer micro-batches in flight than that one, with
    the schedules of which that is known.
    """
    if setup.schedule not in ("gpipe", "1f1b", "interleaved") or len(ranks) < 3:
        return list(ranks)
    middle = ranks[1:-1]
    kinds = [[layers_of(setup, stage) for stage in rank.program.stages] for rank in middle]
    return [
        ranks[0],
        *(rank for rank, own, before in zip(middle, kinds, [None, *kinds], strict=False) if own != before),
        ranks[-1],
    ]


def layers_of(setup: Setup, stage: Stage) -> tuple[Hashable, ...]:
    """Return what decides the blocks of a stage's layers."""
    return (*gradients_of(setup, stage), *(stage.variant(i) for i in range(stage.layers)))


def stages_of(setup: Setup, rank: StagedRank) -> tuple[Hashable, ...]:
    """Return what decides the blocks of a rank's stages."""
    return tuple((stage.span.first, stage.span.last, *layers_of(setup, stage)) for stage in rank.program.stages)


def gradients_of(setup: Setup, stage: Stage) -> tuple[Hashable, ...]:
    """Return where a stage has gradients; nothing if all of it trains."""
    if not stage.has_frozen:
        return ()
    asks = setup.input_require_grads
    return stage.input_wants_gradient(asks=asks), stage.backward_from(asks=asks)
