"""A rank of a pipeline under FSDP2: its stages, and what a micro-batch brings it and takes from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.dtypes import int64
from memcalc.families.base.module import Input
from memcalc.inputs.model import Model
from memcalc.pipelining.encoded import EncodedStage, encoded_spans
from memcalc.pipelining.programs import HIDDEN_STATES, RankProgram, Stage, spans
from memcalc.pipelining.schedules import placement_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.core.dims import Shape
    from memcalc.core.tensor import Memory, Tensor
    from memcalc.layout.context_parallel import ContextParallel
    from memcalc.setup.setup import Setup

BATCH: Final = Dim("batch", 1, (0, 0, 0, 1, 0, 0))
SEQ: Final = Dim("seq", 1, (0, 1, 0, 0, 0, 0))


class StagedRank(NamedTuple):
    """One pipeline rank, with the model of its stages."""

    number: int
    model: Model

    @property
    def program(self) -> RankProgram:
        return self.model.program  # type: ignore[return-value]


def staged_ranks(model: Model, setup: Setup) -> list[StagedRank]:
    """Return all pipeline ranks, first to last."""
    whole: Any = model.program
    if not whole.one_stack:
        of_ranks = encoded_spans(whole, setup.pp, setup.encoder_stages)
        return [
            StagedRank(rank, Model(model.name, model.model_type, RankProgram(whole, own)))
            for rank, own in enumerate(of_ranks)
        ]
    ends, placement = (setup.first_stage_layers, setup.last_stage_layers), placement_of(setup.schedule)
    of_ranks = spans(whole.layers, setup.pp, setup.virtual_stages, *ends, placement)
    return [
        StagedRank(rank, Model(model.name, model.model_type, RankProgram(whole, own)))
        for rank, own in enumerate(of_ranks)
    ]


def leads_to_itself(setup: Setup, rank: int) -> bool:
    """Tell whether a rank's second chunk follows its first one, so that nothing is sent between them: on the last rank of
    a V."""
    return placement_of(setup.schedule) == "in a V" and rank == setup.pp - 1


def gradient_stays(setup: Setup, rank: StagedRank) -> bool:
    """Tell whether a gradient goes from a rank's second chunk to its first one."""
    follows = rank.program.stages[-1]
    return leads_to_itself(setup, rank.number) and follows.input_wants_gradient(asks=setup.input_require_grads)


def outputs_with_gradient(setup: Setup, rank: StagedRank) -> int:
    """Return the number of the rank's stages that get the gradient of their hidden states from another stage."""
    asks = setup.input_require_grads
    return handed((s for s in rank.program.stages if s.backward_from(asks=asks) is not None), "sends", HIDDEN_STATES)


def handed(stages: Iterable[Stage], way: Literal["receives", "sends"], name: str) -> int:
    """Return the number of tensors of a name that stages receive or send for a micro-batch."""
    return sum(getattr(stage, way).count(name) for stage in stages)


def shared_by(rank: StagedRank) -> ContextParallel | None:
    """Return the sharing of sequences; None if ranks share none."""
    return rank.program.context_parallel  # type: ignore[return-value]


def positions_of(rank: StagedRank, own: Dim) -> Input | None:
    """Return the positions of a sequence, if the rank has `own` tokens of it. Return None if the caller does not have
    to give them."""
    shared = shared_by(rank)
    return rank.program.given_positions(own) if shared is None else shared.positions(own)


def handed_shape(rank: StagedRank, name: str) -> Shape:
    """Return the shape of what is handed between two stages for a micro-batch."""
    own: Any = rank.program.stages[0]
    return hidden_states(rank) if rank.program.one_stack else own.handed(name, BATCH, rank.program.whole(SEQ))


def hidden_states(rank: StagedRank) -> Shape:
    """Return the shape of a micro-batch's hidden states between two stages."""
    return BATCH, rank.program.between_layers(rank.program.whole(SEQ)), rank.program.hidden


def tokens_of(stage: Any, batch: Dim, whole: Dim) -> Input:
    """Return the tokens of a micro-batch, or what an encoder is given instead."""
    if isinstance(stage, EncodedStage) and stage.span.first:
        return stage.batch_of(batch, whole)[0]._replace(name="tokens")
    return Input("tokens", (batch, whole), int64)


def held_by_the_context(setup: Setup, rank: StagedRank, memory: Memory, batch: Dim, own: Dim) -> list[Tensor]:
    """Return the tensors held around a step if ranks share sequences."""
    shared, stages = shared_by(rank), rank.program.stages
    if shared is None:
        return []
    has_batch = stages[0].span.first or stages[-1].span.last
    shape = (Dim("micro-batches", setup.micro_batches), batch, own) if has_batch else None
    return shared.held_around_a_schedule(memory, shape, own)
