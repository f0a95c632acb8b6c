"""FSDP2 over the stages of a pipeline (torch.distributed.pipelining): a rank's step on paper.

Every layer of a stage is a unit; the stage's module holds the other parameters. Units are sharded over the mesh's other
axes: dp, and cp if ranks share sequences.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import Dim, workload_size
from memcalc.core.dtypes import fp32
from memcalc.core.rows import Row
from memcalc.core.tensor import Memory, new_tensor
from memcalc.engines.fsdp2.alike import stages_of
from memcalc.engines.fsdp2.engine import sharded_dtype
from memcalc.engines.fsdp2.known import Known, OutOfStep, Writing
from memcalc.engines.fsdp2.pipeline_step import UPDATE, PaperStage
from memcalc.engines.fsdp2.repeated import Repeating
from memcalc.engines.fsdp2.schedules_on_paper import OneForwardOneBackward, Runtime, gpipe, play
from memcalc.engines.fsdp2.staged_rank import (
    StagedRank,
    held_by_the_context,
    leads_to_itself,
    positions_of,
    shared_by,
    staged_ranks,
    tokens_of,
)
from memcalc.engines.fsdp2.stages import StageStep
from memcalc.engines.fsdp2.step import Sharding
from memcalc.engines.fsdp2.written import Written, written
from memcalc.families.base.module import Run, after_forward
from memcalc.families.base.program import Program
from memcalc.families.base.stack import common_pattern
from memcalc.pipelining.encoded import EncodedStage
from memcalc.pipelining.orders import GPIPE_ENDS, Action, enough_micro_batches, lowered, order
from memcalc.pipelining.schedules import flushes, of_each_chunk, placement_of
from memcalc.pipelining.schedules.early_backward import one_forward_one_backward
from memcalc.pipelining.stashing import with_versions
from memcalc.tape.profile import Choices, Moment, profile_of_steps
from memcalc.tape.runs import NO_MIDDLE, ONCE, Middle, Repeated, Trace

if TYPE_CHECKING:
    from collections.abc import Hashable

    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Tensor
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile

__all__ = ["StagedRank", "staged_ranks"]

STAGE: Final = "torch/distributed/pipelining/stage.py"
_MANY_MICRO_BATCHES: Final = 6
"""The micro-batches from which on equal actions are looked for."""
_PERIODS: Final = 6
"""The number of periods of a stage's layers that are run on paper."""


def profile_of(hooks: object, run: Trace) -> Profile:
    """Return the profile of a rank's step, from the run of a similar sharding, with this one's sizes."""
    assert isinstance(hooks, Sharding)
    return profile_of_steps(hooks.resized(run))


def trace_of(setup: Setup, rank: StagedRank, choices: Choices, ranks: dict[Any, Any]) -> Trace:
    """Run a step of this rank on paper, all its micro-batches. `ranks` has what is known of the actions of others."""
    if _repeats_itself(setup, rank):
        stages = setup.schedule, stages_of(setup, rank), Program.remainder(setup.tokens_per_part)
        of_program = rank.program.stages[0].stage_model.branch(setup.micro_batch_size, setup.tokens_per_part)
        shards = setup.micro_batches if setup.shares_sequences else 0
        key = (*choices, stages, shards, of_program)
        if key not in ranks:
            size = workload_size(setup.micro_batch_size, setup.tokens_per_part)
            ranks[key] = Known(size, rank.program.whole(size.seq))
        with suppress(OutOfStep):
            return step_of(setup, rank, choices, ranks[key])
    return step_of(setup, rank, choices, None)


def _repeats_itself(setup: Setup, rank: StagedRank) -> bool:
    """Tell whether equal actions are looked for: with enough micro-batches, and the schedules of which that is known."""
    if not rank.program.one_stack or paper_micro_batches(setup, rank.number) < _MANY_MICRO_BATCHES:
        return False
    return setup.schedule in ("interleaved", "1f1b")


def step_of(setup: Setup, rank: StagedRank, choices: Choices, known: Known | None) -> Trace:
    """Run a step of this rank on paper. Raise OutOfStep if known actions have to run; `known` None runs all of them."""
    memory = Memory(dict(choices.kernels.replaced))
    assert isinstance(choices.hooks, Sharding) and setup.seq_len is not None
    size = known.size if known else workload_size(setup.micro_batch_size, setup.tokens_per_part)
    whole = known.whole if known else rank.program.whole(size.seq)
    shared, given = shared_by(rank), positions_of(rank, whole)
    parallel = rank.program.tensor_parallel
    shard = rank.program.between_layers(whole)
    paper: list[PaperStage] = []
    middle = middle_of(rank)
    for stage in (stage.without(_left_out_layers(middle)) for stage in rank.program.stages):
        run = Run(memory, choices.dtype, choices.attention, choices.recompute, size.batch, whole)
        run.tensor_parallel = parallel
        run.policy = choices.policy
        run.adapters = stage.stage_model.adapters
        run.input_require_grads = choices.input_require_grads and stage.span.first
        for weight in stage.weights():
            run.add_weight(weight, wants_gradient=stage.wants_gradient(weight))
        hooks = StageStep(choices.hooks, run)
        run.hooks = hooks
        for buffer in after_forward(stage.buffers(), setup.seq_len):
            run.add_buffer(buffer)
        run.positions = None if given is None else run.add_input(given)
        if shared is not None and run.positions is not None:
            run.positions = shared.cut_positions(run.positions, whole)
        tokens = run.add_input(tokens_of(stage, size.batch, whole))
        hidden = new_tensor(memory, (size.batch, shard, rank.program.hidden), choices.dtype, "", component="buffers")
        paper.append(_on_paper(stage, run, hooks, tokens, hidden, asks=choices.input_require_grads))
    for stage in paper:
        if stage.last and left_out_micro_batches(setup, rank):
            shape = (Dim("micro-batches", left_out_micro_batches(setup, rank)),)
            stage.losses_left_out = new_tensor(
                memory, shape, loss_dtype(setup, rank), "losses so far", component="gathered"
            )
    if leads_to_itself(setup, rank.number):
        paper[0].lead_to(paper[1], of_each_chunk(setup.schedule, paper_micro_batches(setup, rank.number)))
    _held = held_by_the_context(setup, rank, memory, size.batch, whole)
    memory.enter("forward", None)
    made = _run(setup, rank.number, paper, memory, known)
    place = len(memory.log)
    del _held
    made.log += memory.log[place:]  # blocks from before the first action, whose numbers are the same
    return Trace(
        made.log,
        made.rows,
        made.segments,
        0,
        middle,
        "",
        choices.kernels,
        tuple(made.sent),
        tuple(made.work),
        tuple(sorted(made.ends)),
        tuple(made.sent_once),
        _repeated(setup, rank, paper[0]),
        frozenset(made.renamed),
        pads_queries=memory.pads_queries,
        streamed=tuple(made.streamed),
    )


def _on_paper(stage: Any, run: Run, hooks: StageStep, tokens: Tensor, hidden: Tensor, *, asks: bool) -> PaperStage:
    if isinstance(stage, EncodedStage):
        from memcalc.engines.fsdp2.encoded_stage import EncodedPaperStage

        return EncodedPaperStage(stage, run, hooks, tokens, hidden)
    return PaperStage(stage, run, hooks, tokens, hidden, asks=asks)


def key_of(setup: Setup, rank: StagedRank) -> Hashable:
    """Return the key of the parts of a pipeline that a rank's profile depends on.

    These are its stages, its place, and the number of micro-batches that are run. The last stage's profile also depends
    on the number of those that are not, whose losses are alive. If sequences are shared, every profile depends on the
    batch's shards.
    """
    place = setup.micro_batches if setup.schedule == "gpipe" else (setup.pp, rank.number)
    losses = left_out_micro_batches(setup, rank) if any(span.last for span in rank.program.spans) else 0
    shards = setup.micro_batches if setup.shares_sequences else 0
    return setup.schedule, place, paper_micro_batches(setup, rank.number), losses, shards, stages_of(setup, rank)


def middle_of(rank: StagedRank) -> Middle:
    """Return the layers of each stage that stand for others that are not run.

    After the first unlike layers, the two periods at each end have effects that no other has. The two periods in the
    middle stand for the rest.
    """
    stacks = [[stage.variant(i) for i in range(stage.layers)] for stage in rank.program.stages]
    pattern = common_pattern(stacks)
    if pattern is None:
        return NO_MIDDLE
    lead, period = pattern
    more = (min(map(len, stacks)) - lead) // period - _PERIODS
    first = lead + 2 * period
    middle = Middle(range(first, first + period), range(first + period, first + 2 * period), more)
    return middle if more else NO_MIDDLE


def _left_out_layers(middle: Middle) -> range:
    """Return the number of a stage's layers that are not run: the middle layers stand for them."""
    return range(middle.late.stop, middle.late.stop + middle.more * len(middle.late))


def _repeated(setup: Setup, rank: StagedRank, stage: PaperStage) -> Repeated:
    more = setup.micro_batches - paper_micro_batches(setup, rank.number)
    if setup.schedule != "gpipe" or not more:
        return ONCE
    i, _ = GPIPE_ENDS
    return Repeated(stage.places["forward", i], stage.places["backward", i], more)


def _run(setup: Setup, rank: int, paper: list[PaperStage], memory: Memory, known: Known | None) -> Written:
    """Run a step, and return where it is written. `known`: what is known of its actions; None runs all of them."""
    micro_batches = paper_micro_batches(setup, rank)
    if setup.schedule == "gpipe":
        gpipe(paper[0], micro_batches)
        return written(memory, paper)
    if setup.schedule == "1f1b":
        frame = OneForwardOneBackward(paper[0], setup.pp - rank, micro_batches)
        actions = one_forward_one_backward(setup.pp - rank, micro_batches)
    else:
        frame, actions = Runtime(paper), actions_of(setup, rank, micro_batches)
    if known is None:
        play(paper, frame, actions)
        return written(memory, paper)
    with suppress(OutOfStep):
        return Writing(memory, paper, frame, known).step(actions)
    return Repeating(memory, paper, frame, known).step(actions)


def left_out_micro_batches(setup: Setup, rank: StagedRank) -> int:
    """Return the number of micro-batches of each chunk that the run on paper leaves out."""
    if setup.schedule == "gpipe":
        return 0  # one of the micro-batches that are run stands for them
    return of_each_chunk(setup.schedule, max(0, setup.micro_batches - paper_micro_batches(setup, rank.number)))


def loss_dtype(setup: Setup, rank: StagedRank) -> DType:
    """Return the dtype of the last stage's loss."""
    last = rank.program.stages[-1]
    if isinstance(last, EncodedStage):
        return last.whole_model.loss_in(setup.compute_dtype, sharded_dtype(setup))
    return fp32


def paper_micro_batches(setup: Setup, rank: int) -> int:
    return enough_micro_batches(setup.schedule, rank, setup.pp, setup.micro_batches, setup.virtual_stages)


def actions_of(setup: Setup, rank: int, micro_batches: int) -> list[Action]:
    """Return what a rank does in a step of so many micro-batches. If the pipeline is not emptied, that can be several
    steps."""
    actions = order(setup.schedule, rank, setup.pp, micro_batches, setup.virtual_stages)
    if setup.schedule in ("gpipe", "1f1b"):
        return actions
    if not flushes(setup.schedule):
        return with_versions(actions, setup.schedule, rank, setup.pp, min(setup.micro_batches, micro_batches // 2))
    each, placement = of_each_chunk(setup.schedule, micro_batches), placement_of(setup.schedule)
    return lowered(actions, rank, setup.pp, each, setup.virtual_stages, placement)


def in_flight_at_updates(setup: Setup, made: Profile) -> tuple[Row, ...]:
    """Return the rows of the micro-batches in flight while the weights are updated. There are none if the pipeline is
    empty then."""
    if flushes(setup.schedule):
        return ()
    first = next(place for place, phase, _ in made.run.segments if phase == UPDATE)
    rows = made.rows(Moment((0, 0, 0, 0, 0, 0), 0, first))
    return tuple(row for row in rows if row.component in ("saved_activations", "temporaries"))
