"""The collectives of a rank of Megatron-Core in a step: within its layers, to neighbouring stages, over its
data-parallel ranks.

Gradients and updated weights are sent buffer by buffer (core/distributed/param_and_grad_buffer.py); the distributed
optimizer pads the buffers. The norm of the gradients is summed over all ranks whose optimizers hold other parts of
them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import numel
from memcalc.core.dtypes import DType, fp16, fp32
from memcalc.engines.base.sent import Group, collectives_of_run
from memcalc.engines.megatron.engine import (
    ALIGNED,
    Buffer,
    Stage,
    buffers_of,
    layers_with_expert_bias,
    sequence_dims,
)
from memcalc.engines.megatron.layer_wise import SOURCE as LAYER_WISE
from memcalc.engines.megatron.layer_wise import shards_buffers
from memcalc.engines.megatron.trained_part import trained_weights_of
from memcalc.layout.collectives import Collective, Overlap
from memcalc.layout.layer_kinds import LaterShares, Shares, elements_of, shares_of
from memcalc.megatron.context_parallel.ring import EXCHANGES
from memcalc.megatron.gpt_model import GPTModel
from memcalc.megatron.layout import padded_vocab
from memcalc.setup.setup import DTYPES

if TYPE_CHECKING:
    from memcalc.families.base.module import Weight
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile

_BUFFER: Final = "megatron/core/distributed/param_and_grad_buffer.py"
_DISTRIBUTED: Final = "megatron/core/optimizer/distrib_optimizer.py"
_LAYERS: Final = "megatron/core/tensor_parallel/layers.py"
_PIPELINE: Final = "megatron/core/pipeline_parallel/p2p_communication.py"
_SHARED: Final = "transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py"
_DISPATCHER: Final = "megatron/core/transformer/moe/token_dispatcher.py"
_CROSS_ENTROPY: Final = "megatron/core/tensor_parallel/cross_entropy.py"
_NORM: Final = "megatron/core/optimizer/clip_grads.py, get_grad_norm_fp32"
_OVERFLOW: Final = "megatron/core/optimizer/optimizer.py, _unscale_main_grads_and_check_for_nan"
_LOSS: Final = ("maximum of the logits", "logits of the targets", "sum of exponentials", "softmax statistics")


def collectives_of(setup: Setup, stage: Stage, profiles: list[Profile]) -> list[Collective]:
    """Return what one rank of this stage sends in a step."""
    within = [c for chunk, made in zip(stage.chunks, profiles, strict=True) for c in _within_layers(setup, chunk, made)]
    out = [*_joined(within), *_pipeline(setup, stage)]
    out += [*data_parallel(setup, stage), *_replicated(setup, stage), *_balance(setup, stage), *_norms(setup, stage)]
    return out


def _joined(of_chunks: list[Collective]) -> list[Collective]:
    """Return the collectives of all chunks, with equal ones of several chunks as one."""
    alike: dict[Collective, list[Collective]] = {}
    for c in of_chunks:
        alike.setdefault(c._replace(calls=0, payload=0, formula="", layers=0), []).append(c)
    out: list[Collective] = []
    for one, them in alike.items():
        calls, payload = sum(c.calls for c in them), sum(c.payload for c in them)
        formula = f"{calls}·{one.each} = {calls}·{payload // calls} B"
        out.append(one._replace(calls=calls, payload=payload, formula=formula, layers=sum(c.layers for c in them)))
    return out


def _within_layers(setup: Setup, chunk: GPTModel, profile: Profile) -> list[Collective]:
    experts = setup.ep * setup.etp
    groups = {
        "tp": Group("tp", setup.tp, _LAYERS),
        "cp": Group("cp", setup.cp // (setup.cp_exchange_size or 1), _SHARED),
        EXCHANGES: Group("cp", setup.cp_exchange_size or 1, _SHARED),
        "ep": Group("ep", setup.ep, _DISPATCHER),
        "etp": Group("tp", setup.etp, _DISPATCHER),
        "ep·etp": Group("ep", experts, _DISPATCHER),
    }
    made = collectives_of_run(profile, setup, "decoder.layers.*", groups)
    return [c._replace(overlap=_overlap(c), source=_CROSS_ENTROPY if c.name in _LOSS else c.source) for c in made]


def _overlap(c: Collective) -> Overlap:
    """Return the phase that can hide a collective within the layers.

    In a ring, keys and values are sent while attention runs on those received before (context_parallel.py of
    Transformer Engine). Gathered or exchanged ones must be there first. Of the tensor-parallel collectives only those
    hide that backward starts asynchronously, behind the gradients of a column-parallel layer. These are the second
    gather of its input and the sum of its input's gradient (LinearWithGradAccumulationAndAsyncCommunication in
    layers.py, Linear in transformer_engine/pytorch/module/linear.py).
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
    each = setup.micro_batch_size * setup.tokens_per_part * stage.chunks[0].hidden.size * dtype.itemsize
    forwards = sum(not chunk.layout.last for chunk in stage.chunks)
    backwards = sum(not chunk.layout.first for chunk in stage.chunks)
    name = sequence_dims(setup)[2].name

    def one(what: str, phase: str, boundaries: int) -> Collective:
        calls = boundaries * micro
        unit = f"batch·{name}·hidden·{dtype.itemsize} B"
        formula = f"{calls}·{unit} = {calls}·{each} B"
        # overlap_p2p_comm is on only with virtual stages (megatron/training/arguments.py)
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
            each=unit,
            source=_PIPELINE,
            overlap=overlap,
        )

    out = [one("hidden states to the next stage", "forward", forwards)] if forwards else []
    return out + ([one("gradient to the stage before", "backward", backwards)] if backwards else [])


def data_parallel(setup: Setup, stage: Stage) -> list[Collective]:
    """Return the collectives over data-parallel ranks. All are exposed: overlap_grad_reduce and overlap_param_gather
    are off by default (megatron/training/arguments.py)."""
    out: list[Collective] = []
    grad_dtype = DTYPES[setup.grad_dtype]
    for buffer in buffers_of(setup, stage):
        dense = buffer.name != "experts"
        of = "parameters of the stage" if dense else "parameters of its experts"
        name = "main gradients" if dense else "main gradients of experts"
        if shards_buffers(setup):
            made = _of_distributed_optimizer(setup, buffer, name, of)
        else:
            ranks, total = buffer.data_ranks, buffer.elements
            made = [_of_parameters("all_reduce", name, "backward", grad_dtype, ranks, total, _BUFFER, of=of)]
            if setup.zero:  # each rank has updated some whole weights
                updated, dtype = f"updated {buffer.name}", setup.compute_dtype
                made.append(_of_parameters("all_gather", updated, "step", dtype, ranks, total, LAYER_WISE, of=of))
        made = [c for c in made if c.group_size > 1]
        if stage.layers:
            shares = LaterShares(partial(_shares, stage, buffer, padded=shards_buffers(setup)))
            made = [c._replace(shares=shares) for c in made]
        out += made
    return out


def _shares(stage: Stage, buffer: Buffer, *, padded: bool) -> Shares:
    """Return the layers' shares of a buffer; the padding at its end belongs to no layer."""
    names = {w.name for w in buffer.weights}
    unit = ALIGNED if padded else 1

    def sent(weight: Weight) -> int:
        return -(-elements_of(weight) // unit) * unit if weight.name in names else 0

    found = shares_of(*(filter(chunk.wants_gradient, chunk.weights()) for chunk in stage.chunks), sent=sent)
    return found._replace(whole=buffer.padded if padded else buffer.elements)


def _of_distributed_optimizer(setup: Setup, buffer: Buffer, name: str, of: str) -> list[Collective]:
    """Return the collectives of the distributed optimizer: within an instance, and of the shards between instances
    (`--num-distributed-optimizer-instances`; start_grad_sync)."""
    grad_dtype, ranks, total = DTYPES[setup.grad_dtype], buffer.ranks, buffer.padded
    padded = of if total == buffer.elements else f"padded {of}"
    scattered = _of_parameters("reduce_scatter", name, "backward", grad_dtype, ranks, total, _BUFFER, of=padded)
    updated = f"updated {buffer.name}"
    gathered = _of_parameters("all_gather", updated, "step", buffer.dtype, ranks, total, _DISTRIBUTED, of=padded)
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
    """Return the reductions of finalize_model_grads.py: norms under sequence parallelism, tied embeddings of the first
    and the last stage."""
    out: list[Collective] = []
    source = "megatron/core/distributed/finalize_model_grads.py"
    replicated = ("linear_proj.bias", "linear_fc2.bias", "norm.weight", "norm.bias", "router.weight", "gate_weight",
                  "q_down_proj.weight", "kv_down_proj.weight")  # fmt: skip
    always = ("q_layernorm.weight", "k_layernorm.weight")
    whole = sum(
        numel(w.shape)[0] * n
        for w, n in trained_weights_of(stage).items()
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
    a = stage.chunks[0].a
    trained = any(w.name == "embedding.word_embeddings.weight" for w in trained_weights_of(stage))
    if setup.pp > 1 and trained and (a.tied or a.mtp) and (layout[0].first or layout[1].last):
        table = padded_vocab(a.vocab, setup.tp) // setup.tp * a.hidden
        name, of = (
            "gradient of the tied embedding" if a.tied else "gradient of the embedding's copies",
            "padded vocab/tp·hidden",
        )
        out.append(_of_parameters("all_reduce", name, "step", DTYPES[setup.grad_dtype], 2, table, source, "pp", of))
    return out


def _balance(setup: Setup, stage: Stage) -> list[Collective]:
    """Return the reduction of each expert's token count over all ranks of the stage, which the routers' biases depend
    on (moe_utils.py)."""
    ranks, layers = setup.gpus // setup.pp, layers_with_expert_bias(stage)
    if ranks == 1 or not layers:
        return []
    counts = layers * stage.chunks[0].moe.count.size
    name, formula = "tokens per expert, for the biases of routers", f"layers·experts·4 B = {counts}·4 B"
    source = "megatron/core/transformer/moe/moe_utils.py, get_updated_expert_bias"
    return [
        Collective(
            _outermost(setup, "dp", "cp", "tp"),
            "all_reduce",
            name,
            "step",
            fp32.name,
            ranks,
            1,
            counts * 4,
            formula,
            source=source,
        )
    ]


def _outermost(setup: Setup, *axes: str) -> str:
    """Return the axis that a collective over several axes counts for: the first one with more than one rank."""
    return next((axis for axis in axes if getattr(setup, axis) > 1), "pp")


def _norms(setup: Setup, stage: Stage) -> list[Collective]:
    """Return the reductions of single numbers over all ranks of a distributed optimizer's instance, or over the slices
    of a buffer's weights.

    ChainedOptimizer.step computes the norm whether it clips or not (optimizer.py). Experts have an optimizer of their
    own; on stages without experts it is empty. Its norm is added to the others' before the sum if both are summed over
    the same ranks. With fp16 each optimizer checks for overflows.
    """
    ranks = {"weights": setup.tp * setup.pp, "experts": setup.etp * setup.ep * setup.pp}
    axes = {"weights": _outermost(setup, "tp"), "experts": "ep"}
    if setup.zero:
        sharing = ("dp", "cp") if setup.shards > 1 else ()
        axes = dict.fromkeys(axes, _outermost(setup, *sharing, "tp"))
        ranks = dict.fromkeys(ranks, setup.gpus // setup.replicas)
    trained = stage.chunks[0].layout.trained
    apart = setup.ep > 1 and stage.chunks[0].a.experts is not None and (trained is None or trained.experts)
    optimizers = ["weights", "experts"] if apart else ["weights"]
    numbers = [("overflow check", name, _OVERFLOW) for name in optimizers if setup.compute_dtype is fp16]
    numbers += [("gradient norm", name, _NORM) for name in (optimizers[:1] if setup.zero else optimizers)]
    of = {"weights": "", "experts": " of experts"}
    return [
        Collective(
            axes[name], "all_reduce", what + of[name], "step", fp32.name, ranks[name], 1, 4, "4 B", source=source
        )
        for what, name, source in numbers
        if ranks[name] > 1
    ]
