"""DeepSpeed's PipelineEngine over stages of Megatron-DeepSpeed's GPTModel: what a rank holds, runs and sends.

The engine takes ZeRO stages up to 1. With bf16 and gradients in fp32, which Megatron-DeepSpeed's scripts ask for
(`data_types: {grad_accum_dtype: fp32}`), the optimizer is BF16_Optimizer (deepspeed/runtime/bf16_optimizer.py).
Gradients are in bf16 from the first backward to the step, and after each backward they are added to a flat fp32 buffer
that is never freed. Stage 0 has the same optimizer, which shards its states all the same, but its flat buffer is bf16
(engine.py, _do_optimizer_sanity_check).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import Dim, evaluate, numel, workload_size
from memcalc.core.dtypes import DType, boolean, fp32, int64
from memcalc.core.rows import Component, Row
from memcalc.core.tensor import Memory
from memcalc.engines.base.holdings import Holdings, state_rows, weight_rows
from memcalc.engines.base.sent import Group, collectives_of_run
from memcalc.engines.deepspeed.megatron_deepspeed import LAYERS, LAYERS_SOURCE, slice_of
from memcalc.engines.deepspeed.pipeline_step import PARTS, PaperEngine, Pipe, meta_of, part_of
from memcalc.engines.deepspeed.stages import buffers, enough_micro_batches, instructions, spans
from memcalc.engines.deepspeed.zero_layout import FUSED_ADAM, flat_elements
from memcalc.families.base.module import Run
from memcalc.layout.collectives import Collective, Kind
from memcalc.layout.layer_kinds import shares_of
from memcalc.optimizers import Parameter
from memcalc.setup.setup import DTYPES
from memcalc.tape.profile import Choices, profile_of_steps
from memcalc.tape.runs import NO_MIDDLE, Trace

if TYPE_CHECKING:
    from collections.abc import Hashable

    from memcalc.inputs.model import Model
    from memcalc.megatron.legacy import LegacyGPTModel
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile

PIPE: Final = "deepspeed/runtime/pipe/engine.py"
BF16: Final = "deepspeed/runtime/bf16_optimizer.py"
_BATCH: Final = Dim("batch", 1, (0, 0, 0, 1, 0, 0))
_SEQ: Final = Dim("seq", 1, (0, 1, 0, 0, 0, 0))


class StageRank(NamedTuple):
    """One pipeline rank and its slice of the model."""

    number: int
    model: Model

    @property
    def program(self) -> LegacyGPTModel:
        return self.model.program  # type: ignore[return-value]


def stage_ranks(model: Model, setup: Setup) -> list[StageRank]:
    """Return all stages, first to last."""
    layers = model.program.layers
    return [StageRank(i, slice_of(model, setup, span)) for i, span in enumerate(spans(layers, setup.pp))]


# --- holdings


def holdings_of(setup: Setup, rank: StageRank) -> Holdings:
    """Return what a rank holds besides what a step allocates."""
    dtype, model = setup.compute_dtype, rank.model
    always = weight_rows(model, dtype, "parameters", "always")
    elements = flat_elements(model, setup.dp)
    partition, padding = elements // setup.dp, elements - model.num_parameters
    accumulated = DTYPES[setup.grad_dtype]
    always += _flat_gradients(model, accumulated)
    if padding:
        always += [_block("buffers", "padding of the flat weights", "padding", padding, dtype)]
        always += [_block("buffers", "padding of the flat gradients", "padding", padding, accumulated)]
    always += [_block("optimizer_states", "fp32 master", "parameters/dp", partition, fp32)]
    flat = Parameter("flat fp32 partition", (Dim("parameters/dp", partition),), 1, False)
    always += [row for row in state_rows(setup, [flat], fp32) if row.shape]  # DeepSpeed counts steps in Python
    always += _buffers(setup, rank)
    gradients = weight_rows(model, dtype, "gradients", "first backward to step")
    sent: tuple[Row, ...] = ()
    if accumulated is not dtype:  # a single rank casts them too
        cast = _block("temporaries", "gradients cast to what they are reduced in", "parameters", elements, dtype)
        sent = (cast._replace(life="end of backward", source="deepspeed/runtime/engine.py"),)
    last = rank.number == setup.pp - 1
    loss = (_numbers_row("loss of the last micro-batch", 1, "until the next step"),) if last else ()
    scaled = (_numbers_row("the loss, scaled", 1, "backward"),) if last else ()
    return Holdings(
        tuple(always),
        backward=(*loss, *scaled),
        step=(*gradients, *_largest_of_step(rank, accumulated, partition), *loss),
        after_backward=((*gradients, *sent, *loss),),
    )


def _numbers_row(name: str, count: int, life: str) -> Row:
    return Row("buffers", name, (Dim("numbers", count),), fp32, 1, life, "modelled", PIPE)


def _largest_of_step(rank: StageRank, accumulated: DType, partition: int) -> list[Row]:
    """Return the norms, or the partition's gradients in the dtype of the updated weights: the larger of the two."""
    cast = _block("temporaries", "gradients of the partition in fp32", "parameters/dp", partition, fp32)
    norms = _norms(rank)
    if accumulated is fp32 or norms.nbytes > cast.nbytes:
        return [norms]
    return [cast._replace(life=norms.life), _numbers_row("the norm of this step", 1, norms.life)]


def _norms(rank: StageRank) -> Row:
    """Return the numbers of get_global_norm_of_tensors on the first slice: three per tensor. The first stage counts the
    tied embedding."""
    model, layout = rank.model, rank.program.layout
    tied = rank.program.a.tied and layout.last and not layout.first
    count = sum(model.trained(w) for w in model.weight_classes if not (tied and w.component == "embedding"))
    life = "within the step"
    return Row("temporaries", "norms of gradients", (Dim("numbers", 3 * count),), fp32, 1, life, "modelled", BF16)


def _flat_gradients(model: Model, dtype: DType) -> list[Row]:
    """Return the flat buffer, weight by weight. Weights that get no gradient have a place in it too."""
    return [
        Row("gradients", f"{w.name}: {dtype.name} sum", w.shape, dtype, model.copies(w), "always", "modelled", BF16)
        for w in model.weight_classes
    ]


def _block(component: Component, name: str, dims: str, elements: int, dtype: DType) -> Row:
    return Row(component, name, (Dim(dims, elements),), dtype, 1, "always", "modelled", BF16)


def _buffers(setup: Setup, rank: StageRank) -> list[Row]:
    program, tp = rank.program, setup.tp
    hidden = (_BATCH, _SEQ, program.hidden)
    rows = [
        Row("buffers", "attention mask of all batches", (_SEQ, _SEQ), boolean, source="the caller"),
        Row("buffers", "received hidden states or gradients", part_of(hidden, tp), setup.compute_dtype, source=PIPE),
    ]
    if tp > 1:
        rows.append(Row("buffers", "numbers of the parts", meta_of(tp), int64, source=PIPE))
    if program.a.positions is None:
        rows.append(Row("buffers", "rotary angles", (_SEQ, program.head_dim), fp32, source="the caller"))
    losses = setup.micro_batches if rank.number == setup.pp - 1 else 1
    rows.append(_numbers_row("losses of the step, their means, the norm", losses + 4, "until the next step's"))
    rows.append(Row("buffers", "FusedAdam's overflow flag", (Dim("numbers", 1),), fp32, source=FUSED_ADAM))
    return rows


# --- a step


def profile_of(setup: Setup, rank: StageRank, choices: Choices) -> Profile:
    """Return the profile of a step of this stage, all micro-batches through its schedule."""
    return profile_of_steps(_trace(setup, rank, choices))


def key_of(setup: Setup, rank: StageRank) -> Hashable:
    """Return the key of the parts of a pipeline that a stage's profile depends on."""
    micro_batches = enough_micro_batches(rank.number, setup.pp, setup.micro_batches)
    return setup.pp, rank.number, micro_batches, setup.grad_dtype


def _trace(setup: Setup, rank: StageRank, choices: Choices) -> Trace:
    memory = Memory()
    assert setup.seq_len is not None
    size = workload_size(setup.micro_batch_size, setup.seq_len)
    run = Run(memory, choices.dtype, choices.attention, choices.recompute, size.batch, size.seq)
    for weight in rank.program.weights():
        run.add_weight(weight)
    micro_batches = enough_micro_batches(rank.number, setup.pp, setup.micro_batches)
    count = buffers(rank.number, setup.pp, micro_batches)
    pipe = Pipe(rank.number, setup.pp, count, setup.tp, DTYPES[setup.grad_dtype])
    engine = PaperEngine(rank.program, run, pipe)
    engine.leave_last_step(micro_batches)
    engine.execute(instructions(rank.number, setup.pp, micro_batches))
    memory.enter("backward", None)
    return Trace(
        list(memory.log), memory.rows, memory.segments, 0, NO_MIDDLE, "", choices.kernels, tuple(memory.sent),
        tuple(memory.work), tuple(engine.forward_ends), pads_queries=memory.pads_queries,
        streamed=tuple(memory.streamed),
    )  # fmt: skip


# --- communication


def collectives_of(setup: Setup, rank: StageRank, profile: Profile) -> list[Collective]:
    """Return what one rank of this stage sends in a step."""
    in_run = enough_micro_batches(rank.number, setup.pp, setup.micro_batches)
    groups = {"tp": Group("tp", setup.tp, LAYERS_SOURCE)}
    made = collectives_of_run(profile, setup, LAYERS, groups, in_run)
    within = [c._replace(source=PIPE) if c.name in PARTS else c for c in made]
    return [*within, *_sends(setup, rank), *_tied(setup, rank), *_data_parallel(setup, rank), *_numbers(setup, rank)]


def _sends(setup: Setup, rank: StageRank) -> list[Collective]:
    """Return the sends to neighbouring stages. Each waits for the other side (p2p.py), so nothing hides behind
    compute."""
    out: list[Collective] = []
    first, last = rank.number == 0, rank.number == setup.pp - 1
    part = part_of((_BATCH, _SEQ, rank.program.hidden), setup.tp)
    for what, phase, sends in (
        ("hidden states to the next stage", "forward", not last),
        ("gradient to the stage before", "backward", not first),
    ):
        if not sends:
            continue
        each = evaluate(numel(part)[1], setup.micro_batch_size, setup.tokens_per_part) * setup.compute_dtype.itemsize
        unit = f"{part[0].name if len(part) == 1 else 'batch·seq·hidden'}·{setup.compute_dtype.itemsize} B"
        out.append(_send(what, phase, setup, setup.compute_dtype, unit, each))
        if setup.tp > 1:
            size = numel(meta_of(setup.tp))[0]
            out.append(_send(f"{what}: numbers of the parts", phase, setup, int64, f"{size}·8 B", 8 * size))
    return out


def _send(what: str, phase: str, setup: Setup, dtype: DType, unit: str, each: int) -> Collective:
    m = setup.micro_batches
    formula = f"{m}·{unit} = {m}·{each} B"
    return Collective(
        "pp", "send", what, phase, dtype.name, setup.pp, m, m * each, formula, each=unit, source=PIPE  # type: ignore[arg-type]
    )  # fmt: skip


def _tied(setup: Setup, rank: StageRank) -> list[Collective]:
    """Return the sum of the word embedding's gradients over the first and the last stage (_exec_reduce_tied_grads)."""
    program = rank.program
    if not program.a.tied or 0 < rank.number < setup.pp - 1:
        return []
    dtype = DTYPES[setup.grad_dtype]
    size = program.vocab.size * program.hidden.size
    formula = f"padded vocab/tp·hidden·{dtype.itemsize} B = {size * dtype.itemsize} B"
    name = "gradient of the tied embedding"
    return [_one("pp", "all_reduce", name, "step", dtype, 2, size, formula)]


def _data_parallel(setup: Setup, rank: StageRank) -> list[Collective]:
    """Return the reduction of the flat gradients in one call, as bf16 (communication_data_type), and the gather of the
    updated weights."""
    if setup.dp == 1:
        return []
    dtype, elements = setup.compute_dtype, flat_elements(rank.model, setup.dp)
    formula = f"padded parameters of the stage·{dtype.itemsize} B = {elements * dtype.itemsize} B"
    reduced = _one("dp", "all_reduce", "flat gradients", "backward", dtype, setup.dp, elements, formula)
    gathered = _one("dp", "all_gather", "updated weights", "step", dtype, setup.dp, elements, formula)
    shares = shares_of(rank.model.program.weights())._replace(whole=elements)
    return [c._replace(shares=shares, source=BF16) for c in (reduced, gathered)]


def _numbers(setup: Setup, rank: StageRank) -> list[Collective]:
    """Return the reductions of the norm over all slices and stages, and of the loss (_aggregate_total_loss)."""
    out = [_one("pp", "all_reduce", "gradient norm of all slices", "step", fp32, setup.tp * setup.pp, 1, "1·4 B")]
    if rank.number == setup.pp - 1 and setup.dp > 1:
        out.append(_one("dp", "all_reduce", "loss", "step", fp32, setup.dp, 1, "1·4 B"))
    return [*out, _one("pp", "broadcast", "loss", "step", fp32, setup.pp, 2, "2·4 B")]


def _one(
    axis: str, kind: Kind, name: str, phase: str, dtype: DType, ranks: int, elements: int, formula: str
) -> Collective:
    payload = elements * dtype.itemsize
    return Collective(axis, kind, name, phase, dtype.name, ranks, 1, payload, formula, source=PIPE)  # type: ignore[arg-type]
