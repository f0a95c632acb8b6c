"""Megatron-Core: GPTModel under tensor, sequence and pipeline parallelism, with main gradients and a distributed optimizer.

Weights are 16 bits, gradients are added up in a contiguous fp32 buffer that is there for good
(core/distributed/param_and_grad_buffer.py), the optimizer keeps fp32 weights and two moments: 18 bytes per parameter,
6 + 12/d with `--zero 1`, the distributed optimizer over d data-parallel ranks (core/optimizer/distrib_optimizer.py). In fp32
there are no second weights: 16 bytes, 8 + 8/d.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import lcm
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.collectives import Collective, Overlap
from memcalc.dims import Dim, Shape, evaluate, numel
from memcalc.dtypes import DType, boolean, fp32, int64
from memcalc.engines.holdings import Holdings, state_rows
from memcalc.engines.sent import Group, collectives_of_run
from memcalc.megatron.architecture import ARCHITECTURES, Architecture
from memcalc.megatron.between_stages import left
from memcalc.megatron.gpt_model import GPTModel, Layout, padded_vocab
from memcalc.megatron.schedules import Span, spans_of
from memcalc.optimizers import Parameter
from memcalc.rows import Component, Row
from memcalc.setup import DTYPES

if TYPE_CHECKING:
    from memcalc.families.module import Weight
    from memcalc.inputs.model import Model
    from memcalc.profile import Profile
    from memcalc.setup import Setup

_BUFFER: Final = "megatron/core/distributed/param_and_grad_buffer.py"
_OPTIMIZER: Final = "megatron/core/optimizer/optimizer.py"
_DISTRIBUTED: Final = "megatron/core/optimizer/distrib_optimizer.py"
_LAYERS: Final = "megatron/core/tensor_parallel/layers.py"
_CACHED_POSITIONS: Final = 4096
"""original_max_position_embeddings of MLATransformerConfig"""
SOURCE: Final = "Megatron-Core 0.16.1 megatron/core/models/gpt/gpt_model.py; Transformer Engine 2.11"
TWO: Final = Dim("2", 2)
_PIPELINE: Final = "megatron/core/pipeline_parallel/p2p_communication.py"
_SCHEDULES: Final = "megatron/core/pipeline_parallel/schedules.py"


class Stage(NamedTuple):
    """One pipeline rank: the chunks of the model that it holds."""

    rank: int
    chunks: tuple[GPTModel, ...]


def architecture(model: Model) -> Architecture:
    """The model as GPTModel's configuration has it."""
    return ARCHITECTURES[model.model_type](model.program.config)


def stages(model: Model, setup: Setup) -> list[Stage]:
    """All pipeline ranks, first to last."""
    a = architecture(model)
    chunks = setup.virtual_stages if setup.schedule == "interleaved" else 1
    spans = spans_of(a.layers, setup.pp, chunks, setup.first_stage_layers, setup.last_stage_layers)
    return [
        Stage(rank, tuple(GPTModel(a, _layout(setup, a, span)) for span in spans)) for rank, spans in enumerate(spans)
    ]


def _layout(setup: Setup, a: Architecture, span: Span) -> Layout:
    return Layout(
        tensor_parallel=setup.tp,
        sequence_parallel=setup.sequence_parallel,
        context_parallel=setup.cp,
        cp_comm_type=setup.cp_comm_type,
        expert_parallel=setup.ep,
        expert_tensor_parallel=setup.etp,
        expert_imbalance=setup.expert_imbalance,
        layers=span.layers,
        recompute_layers=setup.recompute_layers,
        routed=a.routed(span.start, span.layers),
        first=span.first,
        last=span.last,
        selective=setup.recompute == "selective",
        fused_loss=setup.cross_entropy == "fused",
        fuses_accumulation=setup.gradient_accumulation_fusion is not False,
        mask_in_batch=setup.attention_mask_in_dataloader is not False,
    )


def weights_of(stage: Stage) -> Counter[Weight]:
    """The weight classes of a stage and how many of each."""
    return Counter(weight._replace(layer=None) for chunk in stage.chunks for weight in chunk.weights())


class Buffer(NamedTuple):
    """Weights whose gradients are reduced together: those of the experts have a data-parallel group of their own."""

    name: str
    divisor: str
    """The name of the group's size."""
    weights: Mapping[Weight, int]
    data_ranks: int
    """Ranks that have the same weights."""
    ranks: int
    """Ranks that share their optimizer states: all of them, or those of one instance of the distributed optimizer."""

    @property
    def elements(self) -> int:
        return sum(numel(w.shape)[0] * n for w, n in self.weights.items())

    @property
    def padded(self) -> int:
        """Elements of the distributed optimizer's buffer: weights begin at multiples of 64, equal shards at such of 128."""
        unit = lcm(self.ranks, 128)
        aligned = sum(-(-numel(w.shape)[0] // 64) * 64 * n for w, n in self.weights.items())
        return -(-aligned // unit) * unit

    def of_a_layer(self, layers: int) -> int:
        """Elements of one of so many layers, the mean."""
        return sum(numel(w.shape)[0] * n for w, n in self.weights.items() if "*" in w.name) // layers


def buffers_of(setup: Setup, stage: Stage) -> list[Buffer]:
    """core/distributed/distributed_data_parallel.py: dense and expert-parallel parameters apart."""
    classes = weights_of(stage)
    dense = {w: n for w, n in classes.items() if w.component != "experts"}
    experts = {w: n for w, n in classes.items() if w.component == "experts"}
    instances = setup.zero and setup.replicas > 1
    divisor = "shard group" if instances else "dp" if setup.cp == 1 else "(dp·cp)"
    out = [Buffer("weights", divisor, dense, setup.dp * setup.cp, setup.shards)]
    if experts:
        ranks = setup.expert_dp
        of_instance = ranks // setup.replicas if setup.zero else 1
        out.append(Buffer("experts", "expert shard group" if instances else "expert dp", experts, ranks, of_instance))
    return out


def holdings_of(setup: Setup, stage: Stage) -> Holdings:
    """What is there all the time; the activations of its chunks come from their profiles."""
    dtype, grad_dtype = setup.compute_dtype, DTYPES[setup.grad_dtype]
    classes = weights_of(stage)
    always = [Row("parameters", w.name, w.shape, dtype, n, "always", "exact", _LAYERS) for w, n in classes.items()]
    always += [
        Row("gradients", f"{w.name}: main gradient", w.shape, grad_dtype, n, "always", "modelled", _BUFFER)
        for w, n in classes.items()
    ]
    step: list[Row] = []
    for buffer in buffers_of(setup, stage):
        always += _padding(setup, buffer)
        parameters = _of_one_rank(setup, buffer)
        if setup.has_master_weights:
            always += [_row("optimizer_states", p, "fp32 main weight", "always", setup) for p in parameters]
        always += [row for row in state_rows(setup, parameters, fp32) if row.shape]
        if grad_dtype is not fp32:
            step += [_row("gradients", p, "fp32 copy of the gradient", "within the step", setup) for p in parameters]
    always += _buffers(setup, stage)
    if setup.pp > 1 and left(stage.rank, len(stage.chunks)):
        step.append(between_stages(setup, stage)._replace(copies=left(stage.rank, len(stage.chunks))))
    return Holdings(tuple(always), step=tuple(step), keeps_gradients=False, accumulates=True)


def _of_one_rank(setup: Setup, buffer: Buffer) -> list[Parameter]:
    """What one rank updates: its weights, or its shard of all of them."""
    if not setup.zero:
        return [Parameter(w.name, w.shape, n, False) for w, n in buffer.weights.items()]
    part = Dim(f"⌈{buffer.name}/{buffer.divisor}⌉", buffer.padded // buffer.ranks)
    return [Parameter(f"flat {buffer.name} of the shard", (part,), 1, False)]


def _padding(setup: Setup, buffer: Buffer) -> list[Row]:
    """What the distributed optimizer's two buffers have between weights that are no multiples of 64, and at the end."""
    padding = buffer.padded - buffer.elements if setup.zero else 0
    of = (("weights", setup.compute_dtype), ("main gradients", DTYPES[setup.grad_dtype]))
    shape = (Dim("padding", padding),)
    return [
        Row("buffers", f"padding of {buffer.name}: {what}", shape, dtype, 1, "always", "modelled", _BUFFER)
        for what, dtype in of
        if padding
    ]


def _row(component: Component, p: Parameter, what: str, life: str, setup: Setup) -> Row:
    source = _DISTRIBUTED if setup.zero else _OPTIMIZER
    return Row(component, f"{p.name}: {what}", p.shape, fp32, p.count, life, "modelled", source)


def _buffers(setup: Setup, stage: Stage) -> list[Row]:
    dtype = setup.compute_dtype
    batch, whole, shard = sequence_dims(setup)
    first, last = stage.chunks[0].layout.first, stage.chunks[-1].layout.last
    rows: list[Row] = []
    if first:
        rows.append(Row("buffers", "tokens", (batch, whole), int64, life="the step's batch", source="the caller"))
    if last:
        rows.append(Row("buffers", "labels", (batch, whole), int64, life="the step's batch", source="the caller"))
        rows.append(Row("buffers", "loss mask", (batch, whole), fp32, life="the step's batch", source="the caller"))
    rows += _global_buffer(setup, stage.chunks[0], batch, whole)
    if setup.gradient_accumulation_fusion:
        rows += _dummy_weight_gradients(stage, dtype)
    routed = sum(sum(chunk.layout.routed) for chunk in stage.chunks)
    if routed:
        per_token = (batch, shard, stage.chunks[0].moe.count)
        for name, kind in (("routing probabilities", dtype), ("map of tokens to experts", boolean)):
            life, source = "until the next micro-batch", "megatron/core/transformer/moe/token_dispatcher.py"
            rows.append(Row("buffers", name, per_token, kind, routed, life, "modelled", source))
    rows += _of_layers(setup, stage)
    fuses = setup.compute_dtype is not fp32 and stage.chunks[0].fuses_softmax(setup.micro_batch_size, setup.rows)
    if setup.attention == "unfused" and not fuses:
        source = "transformer_engine/pytorch/attention/dot_product_attention/softmax.py"
        rows.append(
            Row("buffers", "causal mask of all layers", (whole, whole), boolean, source=source, basis="modelled")
        )
    return rows


def _dummy_weight_gradients(stage: Stage, dtype: DType) -> list[Row]:
    """What autograd is given where the kernel has added the gradient itself: one for each shape, whichever layer's."""
    shapes = [w.shape[-2:] for w in weights_of(stage) if "linear" in w.name and len(w.shape) > 1]
    if stage.chunks[-1].layout.last:
        shapes.append((stage.chunks[0].vocab, stage.chunks[0].hidden))
    of_sizes = {tuple(dim.size for dim in shape): shape for shape in reversed(shapes)}
    source = "transformer_engine/pytorch/module/base.py, get_dummy_wgrad"
    return [
        Row("buffers", "dummy weight gradient", shape, dtype, 1, "always", "modelled", source)
        for shape in sorted(of_sizes.values(), key=lambda s: -numel(s)[0])
    ]


def between_stages(setup: Setup, stage: Stage) -> Row:
    """One of the hidden states and gradients that a rank has between its forwards and backwards (between_stages.py)."""
    batch, _, shard = sequence_dims(setup)
    name, life = "hidden state or gradient between stages", "as the schedule has it"
    shape = (batch, shard, stage.chunks[0].hidden)
    return Row("buffers", name, shape, setup.compute_dtype, 1, life, "modelled", _SCHEDULES)


def _of_layers(setup: Setup, stage: Stage) -> list[Row]:
    """Buffers that every layer has of its own."""
    a, rows = stage.chunks[0].a, list[Row]()
    routed = sum(sum(chunk.layout.routed) for chunk in stage.chunks)
    if routed and a.experts is not None and a.experts.sigmoid:
        source = "megatron/core/transformer/moe/router.py"
        rows.append(
            Row("buffers", "bias and counts of experts", (TWO, stage.chunks[0].moe.count), fp32, routed, source=source)
        )
    if a.latent is not None:
        positions = Dim("positions", max(_CACHED_POSITIONS, setup.seq_len or 0))
        shape = (TWO, positions, Dim("qk_rope_head_dim", a.latent.rope_dim))
        layers = sum(chunk.layers for chunk in stage.chunks)
        source = "megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py"
        rows.append(Row("buffers", "cached cos and sin", shape, setup.compute_dtype, layers, source=source))
    return rows


def _global_buffer(setup: Setup, chunk: GPTModel, batch: Dim, whole: Dim) -> list[Row]:
    """core/utils.py, GlobalMemoryBuffer: one block, as large as the largest tensor that was asked for in it."""
    wanted: list[tuple[str, Shape]] = []
    if setup.sequence_parallel:
        wanted.append(("all-gather buffer", (batch, whole, chunk.hidden)))
    if setup.attention == "eager":
        wanted.append(("attention scores buffer", (batch, chunk.heads, whole, whole)))
    if not wanted:
        return []
    name, shape = max(wanted, key=lambda one: evaluate(numel(one[1])[1], setup.micro_batch_size, setup.rows))
    return [Row("buffers", name, shape, setup.compute_dtype, 1, "always", "modelled", "megatron/core/utils.py")]


def sequence_dims(setup: Setup) -> tuple[Dim, Dim, Dim]:
    """batch, the sequence inside attention and the shard between layers, as polynomials in batch and the shard."""
    layout = Layout(setup.tp, setup.sequence_parallel, setup.cp)
    tp = layout.group(Dim("seq", 1, (0, 1, 0, 0, 0, 0)))
    return Dim("batch", 1, (0, 0, 0, 1, 0, 0)), tp.whole, tp.shard


# --- communication


def collectives_of(setup: Setup, stage: Stage, profiles: list[Profile]) -> list[Collective]:
    """What one rank of this stage sends in a step."""
    out: list[Collective] = []
    for chunk, profile in zip(stage.chunks, profiles, strict=True):
        out += _within_layers(setup, chunk, profile)
    out += _pipeline(setup, stage)
    return [*out, *_data_parallel(setup, stage), *_replicated(setup, stage)]


def _within_layers(setup: Setup, chunk: GPTModel, profile: Profile) -> list[Collective]:
    experts = setup.ep * setup.etp
    groups = {
        "tp": Group("tp", setup.tp, _LAYERS),
        "cp": Group("cp", setup.cp, "transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py"),
        "ep": Group("ep", setup.ep, _DISPATCHER),
        "etp": Group("tp", setup.etp, _DISPATCHER),
        "ep·etp": Group("ep", experts, _DISPATCHER),
    }
    made = collectives_of_run(profile, setup, "decoder.layers.*", groups)
    return [c._replace(overlap=_overlap(c), source=_CROSS_ENTROPY if c.name in _LOSS else c.source) for c in made]


_DISPATCHER: Final = "megatron/core/transformer/moe/token_dispatcher.py"
_CROSS_ENTROPY: Final = "megatron/core/tensor_parallel/cross_entropy.py"
_LOSS: Final = ("maximum of the logits", "logits of the targets", "sum of exponentials", "softmax statistics")


def _overlap(c: Collective) -> Overlap:
    """In a ring keys and values go round while attention runs on those that came before (context_parallel.py of Transformer
    Engine); gathered or exchanged they must be there first.

    Of the tensor-parallel ones only what backward starts asynchronously hides: behind the gradients of a column-parallel layer.

    Those are the second gather of its input and the sum of its input's gradient
    (LinearWithGradAccumulationAndAsyncCommunication in layers.py, Linear in transformer_engine/pytorch/module/linear.py).
    """
    if c.axis == "cp" and c.collective != "send":
        return "exposed"
    if c.axis == "cp":
        return "forward" if c.phase == "forward" else "backward"
    own = c.name.startswith("input gradient of ") or c.name.endswith(", again")
    return "backward" if own and c.phase == "backward" else "exposed"


def _pipeline(setup: Setup, stage: Stage) -> list[Collective]:
    if setup.pp == 1:
        return []
    dtype, micro = setup.compute_dtype, setup.micro_batches
    each = setup.micro_batch_size * setup.rows * stage.chunks[0].hidden.size * dtype.itemsize
    forwards = sum(not chunk.layout.last for chunk in stage.chunks)
    backwards = sum(not chunk.layout.first for chunk in stage.chunks)
    name = sequence_dims(setup)[2].name

    def one(what: str, phase: str, boundaries: int) -> Collective:
        calls = boundaries * micro
        formula = f"{calls}·batch·{name}·hidden·{dtype.itemsize} B = {calls}·{each} B"
        # overlap_p2p_comm is on with virtual stages alone (megatron/training/arguments.py)
        overlap: Overlap = "exposed" if len(stage.chunks) == 1 else "forward" if phase == "forward" else "backward"
        return Collective(
            "pp",
            "send",
            what,
            phase,
            dtype.name,
            setup.pp,
            calls,
            calls * each,
            formula,
            source=_PIPELINE,
            overlap=overlap,
        )

    out = [one("hidden states to the next stage", "forward", forwards)] if forwards else []
    return out + ([one("gradient to the stage before", "backward", backwards)] if backwards else [])


def _data_parallel(setup: Setup, stage: Stage) -> list[Collective]:
    """All exposed: overlap_grad_reduce and overlap_param_gather are off by default (megatron/training/arguments.py)."""
    out: list[Collective] = []
    grad_dtype = DTYPES[setup.grad_dtype]
    layers = sum(chunk.layers for chunk in stage.chunks)
    for buffer in buffers_of(setup, stage):
        dense = buffer.name == "weights"
        of = "parameters of the stage" if dense else "parameters of its experts"
        name = "main gradients" if dense else "main gradients of experts"
        if setup.zero:
            made = _of_distributed_optimizer(setup, buffer, name, of)
        else:
            ranks, total = buffer.data_ranks, buffer.elements
            made = [_of_parameters("all_reduce", name, "backward", grad_dtype, ranks, total, _BUFFER, of=of)]
        share = buffer.of_a_layer(layers), buffer.elements
        out += [c._replace(by_layer=True, shares=share) for c in made if c.group_size > 1]
    return out


def _of_distributed_optimizer(setup: Setup, buffer: Buffer, name: str, of: str) -> list[Collective]:
    """Within an instance, and the shards between instances (`--num-distributed-optimizer-instances`; start_grad_sync)."""
    grad_dtype, ranks, total = DTYPES[setup.grad_dtype], buffer.ranks, buffer.padded
    padded = of if total == buffer.elements else f"padded {of}"
    scattered = _of_parameters("reduce_scatter", name, "backward", grad_dtype, ranks, total, _BUFFER, of=padded)
    updated = f"updated {buffer.name}"
    gathered = _of_parameters("all_gather", updated, "step", setup.compute_dtype, ranks, total, _DISTRIBUTED, of=padded)
    instances, shard = buffer.data_ranks // ranks, total // ranks
    between = f"{name}, between instances of the optimizer"
    shards = f"shard of the {padded}"
    summed = _of_parameters("all_reduce", between, "backward", grad_dtype, instances, shard, _BUFFER, of=shards)
    return [scattered, summed, gathered]


def _of_parameters(
    kind: str, name: str, phase: str, dtype: DType, ranks: int, total: int, source: str, axis: str = "dp",
    of: str = "parameters of the stage",
) -> Collective:  # fmt: skip
    payload = total * dtype.itemsize
    formula = f"{of}·{dtype.itemsize} B = {total}·{dtype.itemsize} B"
    return Collective(axis, kind, name, phase, dtype.name, ranks, 1, payload, formula, source=source)  # type: ignore[arg-type]


def _replicated(setup: Setup, stage: Stage) -> list[Collective]:
    """finalize_model_grads.py: norms under sequence parallelism, tied embeddings of the first and the last stage."""
    out: list[Collective] = []
    source = "megatron/core/distributed/finalize_model_grads.py"
    replicated = ("linear_proj.bias", "linear_fc2.bias", "norm.weight", "norm.bias", "router.weight", "gate_weight",
                  "q_down_proj.weight", "kv_down_proj.weight")  # fmt: skip
    always = ("q_layernorm.weight", "k_layernorm.weight")
    whole = sum(
        numel(w.shape)[0] * n
        for w, n in weights_of(stage).items()
        if w.name.endswith(replicated if setup.sequence_parallel else always)
    )
    if setup.tp > 1 and whole:
        name = "gradients of replicated weights" if setup.sequence_parallel else "gradients of the norms of q and k"
        out.append(
            _of_parameters(
                "all_reduce",
                name,
                "step",
                DTYPES[setup.grad_dtype],
                setup.tp,
                whole,
                source,
                "tp",
                "replicated parameters",
            )
        )
    layout = stage.chunks[0].layout, stage.chunks[-1].layout
    if setup.pp > 1 and stage.chunks[0].a.tied and (layout[0].first or layout[1].last):
        a = stage.chunks[0].a
        table = padded_vocab(a.vocab, setup.tp) // setup.tp * a.hidden
        name, of = "gradient of the tied embedding", "padded vocab/tp·hidden"
        out.append(_of_parameters("all_reduce", name, "step", DTYPES[setup.grad_dtype], 2, table, source, "pp", of))
    return out
