"""Megatron-Core: GPTModel under tensor, sequence and pipeline parallelism, with main gradients and a distributed
optimizer.

Weights are 16 bits. Gradients are added up in a contiguous fp32 buffer that is never freed
(core/distributed/param_and_grad_buffer.py). The optimizer keeps fp32 weights and two moments. That is 18 bytes per
parameter, or 6 + 12/d with `--zero 1`, the distributed optimizer over d data-parallel ranks
(core/optimizer/distrib_optimizer.py). In fp32 there are no second weights: 16 bytes, or 8 + 8/d.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import Dim, Shape, evaluate, numel
from memcalc.core.dtypes import DType, boolean, fp8, fp32, int64
from memcalc.core.rows import Component, Row
from memcalc.engines.base.holdings import Holdings, state_rows, step_temporaries
from memcalc.engines.megatron.layer_wise import SOURCE as LAYER_WISE
from memcalc.engines.megatron.layer_wise import is_by_layer, shards_buffers, updated
from memcalc.engines.megatron.layouts import layout_of, recipe_of
from memcalc.engines.megatron.trained_part import (
    gathers_again,
    gpt_model,
    parameter_rows,
    trained_of,
    trained_weights_of,
    trains_head,
)
from memcalc.families.base.architecture import Architecture, architecture_of
from memcalc.megatron.between_stages import left
from memcalc.megatron.layout import Layout
from memcalc.megatron.schedules import Span, spans_of
from memcalc.optimizers import Parameter
from memcalc.setup.setup import DTYPES

if TYPE_CHECKING:
    from collections.abc import Hashable

    from memcalc.families.base.module import Weight
    from memcalc.inputs.model import Model
    from memcalc.megatron.gpt_model import GPTModel
    from memcalc.setup.setup import Setup

_BUFFER: Final = "megatron/core/distributed/param_and_grad_buffer.py"
_OPTIMIZER: Final = "megatron/core/optimizer/optimizer.py"
_DISTRIBUTED: Final = "megatron/core/optimizer/distrib_optimizer.py"
_LAYERS: Final = "megatron/core/tensor_parallel/layers.py"
ALIGNED: Final = 64
"""Weights begin at multiples of this many elements in the distributed optimizer's buffer."""
_CACHED_POSITIONS: Final = 4096
"""The original_max_position_embeddings of MLATransformerConfig."""
SOURCE: Final = "Megatron-Core 0.16.1 megatron/core/models/gpt/gpt_model.py; Transformer Engine 2.11"
TWO: Final = Dim("2", 2)
_SCHEDULES: Final = "megatron/core/pipeline_parallel/schedules.py"

_ALL: Final = Span(0, 0, True, True)


class Stage(NamedTuple):
    """One pipeline rank, with the chunks of the model that it holds."""

    rank: int
    chunks: tuple[GPTModel, ...]

    @property
    def layers(self) -> int:
        """Return the number of layers; 0 for a stage with only the embedding or the head."""
        return sum(chunk.layers for chunk in self.chunks)

    @property
    def predicting(self) -> int:
        """Return the number of layers of multi-token prediction."""
        return self.chunks[-1].a.mtp if self.chunks[-1].layout.last else 0

    @property
    def routed(self) -> int:
        """Return the number of layers with experts."""
        of_decoder = sum(sum(chunk.layout.routed) for chunk in self.chunks)
        return of_decoder + (self.predicting if self.chunks[-1].a.predicts_by_experts else 0)


def architecture(model: Model) -> Architecture:
    """Return the model as GPTModel's configuration describes it."""
    return architecture_of(model.model_type, model.program.config)


def stages(model: Model, setup: Setup) -> list[Stage]:
    """Return all pipeline ranks, first to last."""
    a = architecture(model)
    chunks = setup.virtual_stages if setup.schedule == "interleaved" else 1
    of_ranks = a.layers, setup.pp, chunks, setup.first_stage_layers, setup.last_stage_layers, setup.stage_layers
    trained = trained_of(model)
    key = "stages", a, of_ranks, layout_of(setup, a, _ALL, trained)
    if key not in model.profiles:
        layouts = [[layout_of(setup, a, span, trained) for span in of_rank] for of_rank in spans_of(*of_ranks)]
        model.profiles[key] = [
            Stage(rank, tuple(_chunk(model, a, one) for one in of_rank)) for rank, of_rank in enumerate(layouts)
        ]
    return model.profiles[key]


def smallest_stage(model: Model, setup: Setup) -> Stage:
    """Return the pipeline rank with the fewest layers; of several, one without the embedding and the head."""
    a = architecture(model)
    chunks = setup.virtual_stages if setup.schedule == "interleaved" else 1
    spans = spans_of(a.layers, setup.pp, chunks, setup.first_stage_layers, setup.last_stage_layers, setup.stage_layers)
    sizes = [(sum(s.layers for s in own), any(s.first or s.last for s in own)) for own in spans]
    rank = sizes.index(min(sizes))
    trained = trained_of(model)
    return Stage(rank, tuple(_chunk(model, a, layout_of(setup, a, span, trained)) for span in spans[rank]))


def _chunk(model: Model, a: Architecture, layout: Layout) -> GPTModel:
    """Return the chunk of this layout, which many setups have in common."""
    key = "chunk", a, layout
    if key not in model.profiles:
        model.profiles[key] = gpt_model(a, layout)
    return model.profiles[key]


def weights_of(stage: Stage) -> Counter[Weight]:
    """Count the weight classes of a stage."""
    out: Counter[Weight] = Counter()
    for chunk in stage.chunks:
        out.update(chunk.weight_classes)
    return out


class Buffer(NamedTuple):
    """Weights whose gradients are reduced together. The experts' weights have a data-parallel group of their own."""

    name: str
    divisor: str
    """The name of the group's size."""
    weights: Mapping[Weight, int]
    data_ranks: int
    """The number of ranks that have the same weights."""
    ranks: int
    """The number of ranks that share the weights' optimizer states: all of them, or those of one instance of the
    distributed optimizer."""
    dtype: DType
    """The dtype of the weights in it."""

    @property
    def elements(self) -> int:
        return sum(numel(w.shape)[0] * n for w, n in self.weights.items())

    @property
    def padded(self) -> int:
        """Return the elements of the distributed optimizer's buffer. Weights begin at multiples of 64, equal shards at
        multiples of 128."""
        unit = lcm(self.ranks, 128)
        aligned = sum(-(-numel(w.shape)[0] // ALIGNED) * ALIGNED * n for w, n in self.weights.items())
        return -(-aligned // unit) * unit


def buffers_of(setup: Setup, stage: Stage) -> list[Buffer]:
    """Return the buffers of a stage: dense and expert-parallel parameters apart
    (core/distributed/distributed_data_parallel.py).

    Experts that all ranks have are among the dense ones (core/extensions/transformer_engine.py: `allreduce`).
    """
    classes = trained_weights_of(stage)
    experts = {w: n for w, n in classes.items() if w.component == "experts" and setup.ep > 1}
    dense = {w: n for w, n in classes.items() if w not in experts}
    instances = setup.zero and setup.replicas > 1
    divisor = "shard group" if instances else "dp" if setup.cp == 1 else "(dp·cp)"
    of_dense, of_experts = [("weights", dense, setup.compute_dtype)], setup.compute_dtype
    if setup.fp8_param_gather:
        from memcalc.engines.megatron.fp8_weights import by_dtype

        of_dense, of_experts = by_dtype(dense, setup.compute_dtype), fp8
    out = [Buffer(name, divisor, own, setup.dp * setup.cp, setup.shards, dtype) for name, own, dtype in of_dense]
    if experts:
        ranks = setup.expert_dp
        of_instance = ranks // setup.replicas if setup.zero else 1
        out.append(
            Buffer(
                "experts", "expert shard group" if instances else "expert dp", experts, ranks, of_instance, of_experts
            )
        )
    return out


def holdings_of(setup: Setup, stage: Stage) -> Holdings:
    """Return what a rank always holds. The activations of its chunks come from their profiles."""
    grad_dtype = DTYPES[setup.grad_dtype]
    always = [row for rows in parameter_rows(setup, stage) for row in rows]
    always += [
        Row("gradients", f"{w.name}: main gradient", w.shape, grad_dtype, n, "always", "modelled", _BUFFER)
        for w, n in trained_weights_of(stage).items()
    ]
    step: list[Row] = []
    aware: list[list[Row]] = []
    for buffer in buffers_of(setup, stage):
        always += _padding(setup, buffer)
        parameters = _of_one_rank(setup, buffer)
        if setup.precision_aware_optimizer:
            from memcalc.engines.megatron.precision_aware_states import states_and_casts

            states, moment = states_and_casts(setup, buffer, parameters)
            always += states
            aware.append(moment)
            continue
        if setup.has_master_weights:
            always += [_row("optimizer_states", p, "fp32 main weight", "always", setup) for p in parameters]
        always += [row for row in state_rows(setup, parameters, fp32) if row.shape]
        if grad_dtype is not fp32:
            step += [_row("gradients", p, "fp32 copy of the gradient", "within the step", setup) for p in parameters]
        if is_by_layer(setup):
            step += step_temporaries(setup.optimizer, setup.optimizer_implementation, parameters, fp32, fp32)
    if aware:  # dense weights and experts in turn
        step += max(aware, key=lambda rows: sum(row.nbytes for row in rows))
    always += _buffers(setup, stage)
    if setup.fp8_recipe is not None:
        from memcalc.engines.megatron.fp8_weights import rows_of

        always += rows_of(recipe_of(setup), trained_weights_of(stage), gathered=setup.fp8_param_gather)
    if setup.pp > 1 and left(stage.rank, len(stage.chunks)):
        step.append(between_stages(setup, stage)._replace(copies=left(stage.rank, len(stage.chunks))))
    waiting = deferred(setup, stage)
    return Holdings(tuple(always), waiting, waiting, tuple(step), keeps_gradients=False, accumulates=True)


def deferred(setup: Setup, stage: Stage) -> tuple[Row, ...]:
    """Return what waits for the gradient of the head's weight (`--defer-embedding-wgrad-compute`): the gradients of the logits
    and the head's inputs of the micro-batches before the last one, which
    LinearWithGradAccumulationAndAsyncCommunication puts aside until the pipeline is empty."""
    limit, chunk = setup.wgrad_deferral_limit, stage.chunks[-1]
    if limit is None or not chunk.layout.last:
        return ()
    count = min(limit or setup.micro_batches, setup.micro_batches - 1)
    batch, whole, shard = sequence_dims(setup)
    shapes = {"gradient of the logits": (batch, whole, chunk.vocab), "input of the head": (batch, shard, chunk.hidden)}
    life = "until the pipeline is empty"
    return tuple(
        Row("buffers", f"{name} that waits", shape, setup.compute_dtype, count, life, "modelled", _LAYERS)
        for name, shape in shapes.items()
        if count
    )


def _of_one_rank(setup: Setup, buffer: Buffer) -> list[Parameter]:
    """Return what one rank updates: its weights, or its shard of all of them."""
    if is_by_layer(setup):
        return updated(setup, buffer.weights, buffer.data_ranks)
    if not setup.zero:
        return [Parameter(w.name, w.shape, n, False) for w, n in buffer.weights.items()]
    part = Dim(f"⌈{buffer.name}/{buffer.divisor}⌉", buffer.padded // buffer.ranks)
    return [Parameter(f"flat {buffer.name} of the shard", (part,), 1, False)]


def _padding(setup: Setup, buffer: Buffer) -> list[Row]:
    """Return the padding in the distributed optimizer's two buffers: between weights that are no multiples of 64, and
    at the end."""
    padding = buffer.padded - buffer.elements if shards_buffers(setup) else 0
    of = (("weights", buffer.dtype), ("main gradients", DTYPES[setup.grad_dtype]))
    shape = (Dim("padding", padding),)
    return [
        Row("buffers", f"padding of {buffer.name}: {what}", shape, dtype, 1, "always", "modelled", _BUFFER)
        for what, dtype in of
        if padding
    ]


def _row(component: Component, p: Parameter, what: str, life: str, setup: Setup) -> Row:
    source = (LAYER_WISE if is_by_layer(setup) else _DISTRIBUTED) if setup.zero else _OPTIMIZER
    return Row(component, f"{p.name}: {what}", p.shape, fp32, p.count, life, "modelled", source)


def _buffers(setup: Setup, stage: Stage) -> list[Row]:
    batch, whole, shard = sequence_dims(setup)
    first, last = stage.chunks[0].layout.first, stage.chunks[-1].layout.last
    rows: list[Row] = []
    if first or stage.predicting:
        rows.append(Row("buffers", "tokens", (batch, whole), int64, life="the step's batch", source="the caller"))
    if last:
        rows.append(Row("buffers", "labels", (batch, whole), int64, life="the step's batch", source="the caller"))
        rows.append(Row("buffers", "loss mask", (batch, whole), fp32, life="the step's batch", source="the caller"))
    rows += _global_buffer(setup, stage, batch, whole)
    if setup.gradient_accumulation_fusion:
        rows += _dummy_weight_gradients(stage, setup.compute_dtype)
    routed = stage.routed
    if routed:
        per_token = (batch, shard, stage.chunks[0].moe.count)
        for name, kind in (("routing probabilities", setup.compute_dtype), ("map of tokens to experts", boolean)):
            life, source = "until the next micro-batch", "megatron/core/transformer/moe/token_dispatcher.py"
            rows.append(Row("buffers", name, per_token, kind, routed, life, "modelled", source))
    rows += _of_layers(setup, stage)
    fuses = setup.compute_dtype is not fp32 and stage.chunks[0].fuses_softmax(
        setup.micro_batch_size, setup.tokens_per_part
    )
    if setup.attention == "unfused" and stage.layers and not fuses:
        source = "transformer_engine/pytorch/attention/dot_product_attention/softmax.py"
        rows.append(
            Row("buffers", "causal mask of all layers", (whole, whole), boolean, source=source, basis="modelled")
        )
    return rows


def _dummy_weight_gradients(stage: Stage, dtype: DType) -> list[Row]:
    """Return the tensors that autograd gets if the kernel has added the gradient itself: one for each shape, for all
    layers."""
    trained = trained_weights_of(stage)
    shapes = [w.shape[-2:] for w in trained if "linear" in w.name and len(w.shape) > 1]
    shapes += [w.shape for w in trained if w.name.endswith("eh_proj.weight")]
    if trains_head(stage):
        shapes.append((stage.chunks[0].vocab, stage.chunks[0].hidden))
    of_sizes = {tuple(dim.size for dim in shape): shape for shape in reversed(shapes)}
    source = "transformer_engine/pytorch/module/base.py, get_dummy_wgrad"
    return [
        Row("buffers", "dummy weight gradient", shape, dtype, 1, "always", "modelled", source)
        for shape in sorted(of_sizes.values(), key=lambda s: -numel(s)[0])
    ]


def between_stages(setup: Setup, stage: Stage) -> Row:
    """Return one of the hidden states and gradients that a rank has between its forwards and backwards
    (between_stages.py)."""
    batch, _, shard = sequence_dims(setup)
    name, life = "hidden state or gradient between stages", "as the schedule has it"
    shape = (batch, shard, stage.chunks[0].hidden)
    return Row("buffers", name, shape, setup.compute_dtype, 1, life, "modelled", _SCHEDULES)


def layers_with_expert_bias(stage: Stage) -> int:
    """Return the number of layers whose routers have a balancing bias for each expert
    (`--moe-router-enable-expert-bias`)."""
    experts = stage.chunks[0].a.experts
    return stage.routed if experts is not None and experts.sigmoid else 0


def _of_layers(setup: Setup, stage: Stage) -> list[Row]:
    """Return the buffers that every layer has of its own."""
    a, rows = stage.chunks[0].a, list[Row]()
    routed = layers_with_expert_bias(stage)
    if routed:
        source = "megatron/core/transformer/moe/router.py"
        rows.append(
            Row("buffers", "bias and counts of experts", (TWO, stage.chunks[0].moe.count), fp32, routed, source=source)
        )
    layers = stage.layers + stage.predicting
    if a.latent is not None and layers:
        shape = (TWO, Dim("positions", _cached_positions(setup)), Dim("qk_rope_head_dim", a.latent.rope_dim))
        source = "megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py"
        rows.append(Row("buffers", "cached cos and sin", shape, setup.compute_dtype, layers, source=source))
    return rows


def _cached_positions(setup: Setup) -> int:
    return max(_CACHED_POSITIONS, setup.seq_len or 0)


def decided_by_length(setup: Setup, stage: Stage) -> Hashable:
    """Return the part of a sequence length that decides which rows a stage holds, besides the branches of its
    chunks."""
    positions = None if stage.chunks[0].a.latent is None else _cached_positions(setup)
    return positions, *(row.name for row in _global_buffer(setup, stage, *sequence_dims(setup)[:2]))


def _global_buffer(setup: Setup, stage: Stage, batch: Dim, whole: Dim) -> list[Row]:
    """Return the block of GlobalMemoryBuffer (core/utils.py). It is as large as the largest tensor that was requested
    in it. A stage with only an embedding requests none."""
    chunk = stage.chunks[0]
    wanted: list[tuple[str, Shape]] = []
    gathers = stage.layers or chunk.layout.last
    if setup.fp8_recipe is not None:  # its layers gather into tensors of their own
        gathers = stage.chunks[-1].layout.last
    if setup.sequence_parallel and gathers and gathers_again(stage):
        wanted.append(("all-gather buffer", (batch, whole, chunk.hidden)))
    if setup.attention == "eager" and stage.layers:
        wanted.append(("attention scores buffer", (batch, chunk.heads, whole, whole)))
    if not wanted:
        return []
    name, shape = max(wanted, key=lambda one: evaluate(numel(one[1])[1], setup.micro_batch_size, setup.tokens_per_part))
    return [Row("buffers", name, shape, setup.compute_dtype, 1, "always", "modelled", "megatron/core/utils.py")]


def sequence_dims(setup: Setup) -> tuple[Dim, Dim, Dim]:
    """Return batch, the sequence inside attention, and the shard between layers, as polynomials in batch and the
    shard."""
    return _sequence_dims(Layout(setup.tp, setup.sequence_parallel, setup.cp))


@lru_cache(maxsize=1024)
def _sequence_dims(layout: Layout) -> tuple[Dim, Dim, Dim]:
    tp = layout.group(Dim("seq", 1, (0, 1, 0, 0, 0, 0)))
    return Dim("batch", 1, (0, 0, 0, 1, 0, 0)), tp.whole, tp.shard
