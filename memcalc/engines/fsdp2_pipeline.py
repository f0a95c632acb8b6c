"""FSDP2 over the stages of a pipeline (torch.distributed.pipelining): what a rank holds, runs and sends.

Every layer of a stage is a unit of its own, and the stage's module holds the rest. dp is the mesh's other axis.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.collectives import Collective, Overlap
from memcalc.dims import Dim, numel, workload_size
from memcalc.dtypes import fp32, int64
from memcalc.engines.fsdp2 import sharded_dtype, states_and_step
from memcalc.engines.fsdp2_stages import StageStep
from memcalc.engines.fsdp2_step import Sharding
from memcalc.engines.holdings import Holdings
from memcalc.engines.pipeline_step import PaperStage, gpipe, one_forward_one_backward, runtime
from memcalc.families.module import Input, Run
from memcalc.inputs.model import Model
from memcalc.pipelining.orders import lowered, order
from memcalc.pipelining.programs import RankProgram, spans
from memcalc.profile import NO_MIDDLE, Choices, Trace, profile_of_steps
from memcalc.rows import Row
from memcalc.tensor import Memory, new_tensor

if TYPE_CHECKING:
    from memcalc.dtypes import DType
    from memcalc.profile import Profile
    from memcalc.setup import Setup

_STAGE: Final = "torch/distributed/pipelining/stage.py"
_FSDP: Final = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
_BATCH: Final = Dim("batch", 1, (0, 0, 0, 1, 0, 0))
_SEQ: Final = Dim("seq", 1, (0, 1, 0, 0, 0, 0))


class StagedRank(NamedTuple):
    """One pipeline rank: the model of its stages."""

    number: int
    model: Model

    @property
    def program(self) -> RankProgram:
        return self.model.program  # type: ignore[return-value]


def staged_ranks(model: Model, setup: Setup) -> list[StagedRank]:
    """All pipeline ranks, first to last."""
    whole: Any = model.program
    of_ranks = spans(whole.layers, setup.pp, setup.virtual_stages, setup.first_stage_layers, setup.last_stage_layers)
    return [
        StagedRank(rank, Model(model.name, model.model_type, RankProgram(whole, own)))
        for rank, own in enumerate(of_ranks)
    ]


def holdings_of(setup: Setup, rank: StagedRank) -> Holdings:
    """States and buffers; what a step allocates is in its profile."""
    always, step, sharding = states_and_step(rank.model, setup)
    sharding = sharding._replace(accumulating=False)  # one reduction a step
    return Holdings((*always, *_buffers(setup, rank)), step=tuple(step), hooks=sharding)


def _buffers(setup: Setup, rank: StagedRank) -> list[Row]:
    stages, micro = rank.program.stages, Dim("micro-batches", setup.micro_batches)
    first, last = stages[0].span.first, stages[-1].span.last
    rows: list[Row] = []
    if first or last:
        name = "input_ids (also the labels)" if first and last else "input_ids" if first else "labels"
        rows.append(Row("buffers", name, (micro, _BATCH, _SEQ), int64, life="the step's batch", source="the caller"))
    if last:
        rows.append(Row("buffers", "losses", (micro,), fp32, life="until the next step's", source="the caller"))
    hidden = (micro, _BATCH, _SEQ, rank.program.hidden)
    for what, has in (("received hidden states", "first"), ("received gradients", "last")):
        copies = sum(not getattr(stage.span, has) for stage in stages)
        if copies:
            rows.append(Row("buffers", what, hidden, setup.compute_dtype, copies, "always", "exact", _STAGE))
    kinds = Counter(buffer._replace(layer=None) for stage in stages for buffer in stage.buffers())
    for buffer, copies in kinds.items():
        dtype = buffer.dtype or sharded_dtype(setup)
        rows.append(Row("buffers", buffer.name, buffer.shape, dtype, copies, source="transformers' modelling code"))
    return rows


# --- a step


def profile_of(setup: Setup, rank: StagedRank, choices: Choices) -> Profile:
    """What is alive in a step of this rank, all micro-batches through its schedule."""
    return profile_of_steps(_trace(setup, rank, choices))


def _trace(setup: Setup, rank: StagedRank, choices: Choices) -> Trace:
    memory = Memory(dict(choices.kernels.replaced))
    assert isinstance(choices.hooks, Sharding) and setup.seq_len is not None
    size = workload_size(setup.micro_batch_size, setup.seq_len)
    paper: list[PaperStage] = []
    for stage in rank.program.stages:
        run = Run(memory, choices.dtype, choices.attention, choices.recompute, size.batch, size.seq)
        for weight in stage.weights():
            run.add_weight(weight)
        hooks = StageStep(choices.hooks, run)
        run.hooks = hooks
        for buffer in stage.buffers():
            run.add_buffer(buffer)
        tokens = run.add_input(Input("tokens", (size.batch, size.seq), int64))
        hidden = new_tensor(memory, (size.batch, size.seq, rank.program.hidden), choices.dtype, "", component="buffers")
        paper.append(PaperStage(stage, run, hooks, tokens, hidden))
    memory.enter("forward", None)
    _run(setup, rank.number, paper)
    for stage in paper:
        for loss in stage.losses:
            memory.relabel(loss.storage, (), "buffers", "loss", None)
    ends = tuple(sorted(end for stage in paper for end in stage.forward_ends))
    return Trace(
        list(memory.log), memory.rows, memory.segments, 0, NO_MIDDLE, "", choices.kernels, tuple(memory.sent), ends
    )


def _run(setup: Setup, rank: int, paper: list[PaperStage]) -> None:
    ranks, micro, chunks = setup.pp, setup.micro_batches, setup.virtual_stages
    if setup.schedule == "gpipe":
        gpipe(paper[0], micro)
    elif setup.schedule == "1f1b":
        one_forward_one_backward(paper[0], micro, ranks - rank)
    else:
        runtime(paper, lowered(order(setup.schedule, rank, ranks, micro, chunks), rank, ranks, micro, chunks))


# --- communication


def collectives_of(setup: Setup, rank: StagedRank, profile: Profile) -> list[Collective]:
    """What one rank sends in a step."""
    return [*_sends(setup, rank), *_of_units(setup, rank, profile)]


def _sends(setup: Setup, rank: StagedRank) -> list[Collective]:
    dtype, stages = setup.compute_dtype, rank.program.stages
    each = setup.micro_batch_size * (setup.seq_len or 1) * rank.program.hidden.size * dtype.itemsize
    out: list[Collective] = []
    for what, phase, end in (
        ("hidden states to the next stage", "forward", "last"),
        ("gradient to the stage before", "backward", "first"),
    ):
        calls = setup.micro_batches * sum(not getattr(stage.span, end) for stage in stages)
        if calls:
            unit = f"batch·seq·hidden·{dtype.itemsize} B"
            out.append(
                Collective(
                    "pp",
                    "send",
                    what,
                    phase,
                    dtype.name,
                    setup.pp,
                    calls,
                    calls * each,
                    f"{calls}·{unit} = {calls}·{each} B",
                    each=unit,
                    source=_STAGE,
                )
            )
    return out


class _Unit(NamedTuple):
    """Equal collectives of equal units."""

    kind: str
    name: str
    phase: str
    dtype: DType
    in_layers: bool
    elements: int


def _of_units(setup: Setup, rank: StagedRank, profile: Profile) -> list[Collective]:
    """FSDP2's own, counted in the run. Those of the root are exposed; so is what is reduced when all backwards are done."""
    layers = next(w.name.split("*")[0] + "*" for w in rank.model.weight_classes if w.layer is not None)
    calls = Counter(
        _Unit(s.kind, s.name, s.phase, s.dtype, s.layer is not None, numel(s.shape)[0]) for s in profile.run.sent
    )
    out: list[Collective] = []
    for one, n in calls.items():
        ranks = setup.dp // setup.shards if one.kind == "all_reduce" else setup.shards
        unit, each = f"unit·{one.dtype.itemsize} B", one.elements * one.dtype.itemsize
        hides = one.in_layers and one.kind == "all_gather" and setup.schedule in ("gpipe", "1f1b")
        overlap: Overlap = "exposed" if not hides else "forward" if one.phase == "forward" else "backward"
        out.append(
            Collective(
                "dp",
                one.kind,  # type: ignore[arg-type]
                f"{one.name}, {'layers' if one.in_layers else 'outside the layers'}",
                one.phase,
                one.dtype.name,
                ranks,
                n,
                n * each,
                f"{n}·{unit} = {n}·{each} B",
                layers if one.in_layers else None,
                each=unit,
                source=_FSDP,
                overlap=overlap,
            )
        )
    return out
