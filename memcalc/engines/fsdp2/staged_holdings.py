"""A pipeline's rank under FSDP2, as it is between steps and around one: its shards, its buffers, and what micro-batches
bring that the run on paper does not have."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from memcalc.core.dims import Dim
from memcalc.core.dtypes import int64
from memcalc.core.rows import Row
from memcalc.engines.base.holdings import Holdings
from memcalc.engines.fsdp2.engine import order_of, rows_of, sharded_dtype, states_and_step
from memcalc.engines.fsdp2.pipeline import STAGE, left_out_micro_batches, loss_dtype, paper_micro_batches
from memcalc.engines.fsdp2.staged_rank import (
    BATCH,
    SEQ,
    StagedRank,
    gradient_stays,
    handed,
    handed_shape,
    hidden_states,
    leads_to_itself,
    outputs_with_gradient,
    positions_of,
    shared_by,
)
from memcalc.engines.fsdp2.step import COPY_IN
from memcalc.families.base.module import after_forward
from memcalc.pipelining.encoded import ENCODED, EncodedStage
from memcalc.pipelining.orders import most_in_flight, order
from memcalc.pipelining.programs import HIDDEN_STATES
from memcalc.pipelining.schedules import flushes, of_each_chunk, placement_of, schedule_of, versions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.setup.setup import Setup


def holdings_of(setup: Setup, rank: StagedRank) -> Holdings:
    """Return a rank's states and buffers. What a step allocates is in the profile."""
    always, step, sharding = states_and_step(rank.model, setup)
    sharding = sharding._replace(accumulating=False)  # one reduction per step
    held = (*_stashed(setup, rank), *_buffers(setup, rank), *_of_left_out(setup, rank))
    made = [row for row in always if row.component == "parameters"]
    order = order_of(rank.model, setup, [*made, *held], sharding)
    if setup.schedule not in ("gpipe", "1f1b"):
        order = order._replace(streams=_explicit(order.streams))
    return Holdings((*always, *held), (), (), tuple(step), hooks=sharding, order=order)


def _stashed(setup: Setup, rank: StagedRank) -> list[Row]:
    """Return the rows of older versions of the weights, shards in the dtype that they are multiplied in. They are gathered
    again for the backwards that need them."""
    extra = _versions(setup, rank.number) - 1
    if not extra:
        return []
    rows = rows_of(rank.model, setup, "parameters", "always", lambda weight: rank.model.copies(weight) * extra)
    name, source = "older version" if extra == 1 else f"{extra} older versions", schedule_of(setup.schedule).source
    return [
        row._replace(name=f"{row.name}: {name}", dtype=setup.compute_dtype, basis="modelled", source=source)
        for row in rows
    ]


def _versions(setup: Setup, rank: int) -> int:
    """Return the number of versions of the weights that a rank has at once."""
    if flushes(setup.schedule):
        return 1
    return versions(schedule_of(setup.schedule), rank, setup.pp, setup.micro_batches)


def _explicit(streams: Mapping[str, str]) -> dict[str, str]:
    """Return the streams where a schedule gathers the units itself (FSDPModule.unshard with `async_op`): gathers take the
    current stream then (FSDPCommContext.get_all_gather_streams)."""
    return {name: stream for name, stream in streams.items() if stream != COPY_IN}


def _of_left_out(setup: Setup, rank: StagedRank) -> list[Row]:
    """Return the rows that the left-out micro-batches add up over a step. Behind a backward in two halves these are the
    gradients of the inputs, which stay until the next step begins (clear_runtime_states)."""
    copies = sum(stage.input_wants_gradient(asks=setup.input_require_grads) for stage in rank.program.stages)
    copies -= gradient_stays(setup, rank)  # these are the gradients that the stage before has
    if not (left_out_micro_batches(setup, rank) and copies and setup.schedule in ("zero-bubble", "zbv")):
        return []
    shape = (Dim("micro-batches", left_out_micro_batches(setup, rank)), *hidden_states(rank))
    name, life = "gradients of received hidden states", "until the next step"
    return [Row("buffers", name, shape, setup.compute_dtype, copies, life, source=STAGE)]


def _buffers(setup: Setup, rank: StagedRank) -> list[Row]:
    stages = rank.program.stages
    first, last = (any(getattr(stage.span, end) for stage in stages) for end in ("first", "last"))
    own = rank.program.whole(SEQ)
    shared, positions = shared_by(rank), positions_of(rank, own)
    whole = own if shared is None else shared.whole(own)
    rows: list[Row] = []
    of_chunk = Dim("micro-batches", _held_micro_batches(setup, rank.number))
    if positions is not None:
        rows.append(Row("buffers", positions.name, positions.shape, int64, source="the caller"))
    if not rank.program.one_stack:
        given = [one for stage in stages if isinstance(stage, EncodedStage) for one in stage.batch_of(BATCH, whole)]
        rows += [
            Row("buffers", one.name, (of_chunk, *one.shape), one.dtype or setup.compute_dtype, life="the step's batch",
                source="the caller")
            for one in given
        ]  # fmt: skip
    elif first or last:
        labels = "labels" if shared is None else "shift_labels"
        name = "input_ids (also the labels)" if first and last else "input_ids" if first else labels
        halves = first and last and placement_of(setup.schedule) == "both ways"
        if halves:
            name = "input_ids of one half, labels of the other"
        micro = Dim("micro-batches", of_chunk.size * (2 if halves else 1))
        rows.append(Row("buffers", name, (micro, BATCH, whole), int64, life="the step's batch", source="the caller"))
    if last:
        of_losses, life = loss_dtype(setup, rank), "until the next step's"
        rows.append(Row("buffers", "losses", (of_chunk,), of_losses, life=life, source="the caller"))
    own_way = leads_to_itself(setup, rank.number)
    for what, of, received, stays in (
        ("received hidden states", HIDDEN_STATES, handed(stages, "receives", HIDDEN_STATES), own_way),
        ("received gradients", HIDDEN_STATES, outputs_with_gradient(setup, rank), gradient_stays(setup, rank)),
        ("received encoder output", ENCODED, handed(stages, "receives", ENCODED), False),
        ("received gradients of the encoder output", ENCODED, handed(stages, "sends", ENCODED), False),
    ):
        hidden = (of_chunk, *handed_shape(rank, of))
        copies = received - stays
        if stays:  # those of the micro-batches that are run are in the run
            few = (Dim("micro-batches", left_out_micro_batches(setup, rank)), *hidden_states(rank))
            of_here = f"{what} of this rank's other stage"
            if few[0].size:
                rows.append(
                    Row("buffers", of_here, few, setup.compute_dtype, 1, "until the next step's", "exact", STAGE)
                )
        if copies:
            rows.append(Row("buffers", what, hidden, setup.compute_dtype, copies, "always", "exact", STAGE))
    kinds = Counter(
        buffer._replace(layer=None) for stage in stages for buffer in after_forward(stage.buffers(), setup.seq_len or 0)
    )
    for buffer, copies in kinds.items():
        dtype = buffer.dtype or sharded_dtype(setup)
        rows.append(Row("buffers", buffer.name, buffer.shape, dtype, copies, source="transformers' modelling code"))
    return rows


def _held_micro_batches(setup: Setup, rank: int) -> int:
    """Return the number of micro-batches that each chunk has buffers for: those of a step, or those in flight if there are
    more of them."""
    own = of_each_chunk(setup.schedule, setup.micro_batches)
    if flushes(setup.schedule):
        return own
    return max(own, most_in_flight(order(setup.schedule, rank, setup.pp, paper_micro_batches(setup, rank))))


def steady_micro_batches(setup: Setup, rank: int) -> int:
    """Return the number of micro-batches whose order has as many in flight as a step has: its own, or more of them if those
    of other steps are in flight too."""
    return (
        setup.micro_batches if flushes(setup.schedule) else max(setup.micro_batches, paper_micro_batches(setup, rank))
    )
