"""The setup options, declared once for every command that takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from memcalc.cli.completion import values_of
from memcalc.registry import ENGINES, EVERY_OPTIMIZER

_MODEL = "Model and precision"
_PARALLEL = "GPUs and parallelism"
METHOD = "Batch and method"
_BATCH = METHOD
KNOBS = "Knobs of one engine"
LENGTHS = ("seq_len", "completion_len")
"""The options that are tokens, also as 4k."""
SWITCHES = (
    "sequence_parallel",
    "overlap_comm",
    "gradient_accumulation_fusion",
    "attention_mask_in_dataloader",
    "sync_each_micro_batch",
    "use_orig_params",
    "forward_prefetch",
    "input_require_grads",
    "reentrant_checkpoints",
)
"""The options that can be on by default, so that switching them off is an option given."""


def option(help: str, panel: str, *names: str) -> object:
    """Return an option of a help panel. Its help text has to name the default."""
    return typer.Option(
        *names, help=help, rich_help_panel=panel, show_default=False, autocompletion=values_of(names[0])
    )


Model = Annotated[
    str | None, option("Bundled name or alias, Hub id, path to a config.json or its folder.", _MODEL, "--model", "-m")
]
Name = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A model, as for --model.", show_default=False, autocompletion=values_of("model")
    ),
]
Params = Annotated[
    str | None,
    option(
        "A parameter count (7.5B) gives model states only. They can be too large for --gpu, but cannot show that it fits.",
        _MODEL,
        "--params",
    ),
]
Precision = Annotated[
    str | None,
    option(
        "fp32, bf16, fp16, bf16-mixed (default), fp16-mixed, bf16-autocast, fp16-autocast, fp8-mixed.",
        _MODEL,
        "--precision",
    ),
]
GradDtype = Annotated[
    str | None, option("fp32, bf16, fp16. (default: by --precision and --engine)", _MODEL, "--grad-dtype")
]
Gpus = Annotated[int | None, option("Total GPUs. (default: 1)", _PARALLEL, "--gpus", "-g")]
GpusPerNode = Annotated[
    int | None,
    option("GPUs per node: they decide which links a group uses. (default: 8)", _PARALLEL, "--gpus-per-node"),
]
Dp = Annotated[
    int | None,
    option("Data parallel degree. The other degrees decide it; a given value is checked.", _PARALLEL, "--dp"),
]
Tp = Annotated[int | None, option("Tensor parallel degree. (default: 1)", _PARALLEL, "--tp")]
Pp = Annotated[int | None, option("Pipeline parallel degree. (default: 1)", _PARALLEL, "--pp")]
Cp = Annotated[int | None, option("Context parallel degree. (default: 1)", _PARALLEL, "--cp")]
CpCommType = Annotated[
    str | None,
    option(
        "How --cp communicates: p2p (a ring), all_gather, a2a (Ulysses), a2a+p2p. (default: megatron p2p, fsdp2 all_gather, "
        "deepspeed a2a)",
        _PARALLEL,
        "--cp-comm-type",
    ),
]
Ep = Annotated[int | None, option("Expert parallel degree. (default: 1)", _PARALLEL, "--ep")]
Etp = Annotated[int | None, option("Tensor parallel degree of the experts. (default: tp)", _PARALLEL, "--etp")]
PpRank = Annotated[int | None, option("Report this pipeline rank. (default: the worst)", _PARALLEL, "--pp-rank")]
Zero = Annotated[int | None, option("ZeRO stage 0, 1, 2 or 3. (default: 0; engine fsdp2: 3)", _PARALLEL, "--zero")]
ShardGroup = Annotated[
    int | None,
    option(
        "GPUs in a group that shards (fsdp2's hybrid sharding, megatron's optimizer instances). (default: all of dp·cp)",
        _PARALLEL,
        "--shard-group",
    ),
]
SequenceParallel = Annotated[
    bool | None,
    option(
        "Shard activations along the sequence between layers. (default: on with engine megatron and tp > 1)",
        _PARALLEL,
        "--sequence-parallel/--no-sequence-parallel",
    ),
]
GradientAccumulationFusion = Annotated[
    bool | None,
    option(
        "Megatron's kernel that computes a weight gradient also adds it to the main gradient. (default: on)",
        KNOBS,
        "--gradient-accumulation-fusion/--no-gradient-accumulation-fusion",
    ),
]
AttentionMaskInDataloader = Annotated[
    bool | None,
    option(
        "Megatron's batches have a mask of seq × seq tokens, which fused attention ignores. (default: on)",
        KNOBS,
        "--attention-mask-in-dataloader/--no-attention-mask-in-dataloader",
    ),
]
SyncEachMicroBatch = Annotated[
    bool | None,
    option(
        "ddp, fsdp2: reduce gradients after every micro-batch, not only after the last. (default: off, as accelerate and "
        "Lightning do with no_sync)",
        KNOBS,
        "--sync-each-micro-batch/--no-sync-each-micro-batch",
    ),
]
Schedule = Annotated[
    str | None,
    option(
        "gpipe, 1f1b, interleaved; with fsdp2 also zero-bubble, zbv, dualpipev and those of papers. (default: 1f1b)",
        _PARALLEL,
        "--schedule",
    ),
]
VirtualStages = Annotated[
    int | None, option("Model chunks per pipeline rank. (default: 1)", _PARALLEL, "--virtual-stages")
]
ReduceBucketSize = Annotated[
    int | None,
    option("Elements of DeepSpeed's reduce bucket. (default: 500000000)", KNOBS, "--reduce-bucket-size"),
]
MaxLiveParameters = Annotated[
    int | None,
    option(
        "Most elements that ZeRO-3 keeps gathered. (DeepSpeed's default: 1000000000)", KNOBS, "--max-live-parameters"
    ),
]
MaxReuseDistance = Annotated[
    int | None,
    option(
        "ZeRO-3 keeps a parameter gathered if its next use is this many elements away or less. (DeepSpeed's default: "
        "1000000000)",
        KNOBS,
        "--max-reuse-distance",
    ),
]
ParamPersistenceThreshold = Annotated[
    int | None,
    option(
        "ZeRO-3 always keeps parameters of up to this many elements gathered. (DeepSpeed's default: 100000)",
        KNOBS,
        "--param-persistence-threshold",
    ),
]
PrefetchBucketSize = Annotated[
    int | None,
    option(
        "Elements that ZeRO-3 gathers in advance at a time. (DeepSpeed's default: 50000000)",
        KNOBS,
        "--prefetch-bucket-size",
    ),
]
SubGroupSize = Annotated[
    int | None,
    option("Elements that ZeRO-3 updates at a time. (DeepSpeed's default: 1000000000)", KNOBS, "--sub-group-size"),
]
OverlapComm = Annotated[
    bool | None,
    option(
        "ZeRO-2 reduces one bucket while backward fills another. (DeepSpeed's default: off; with ZeRO-3 always on)",
        KNOBS,
        "--overlap-comm/--no-overlap-comm",
    ),
]
FirstStageLayers = Annotated[
    int | None,
    option(
        "Layers of the first pipeline rank. (default: as many as the others, or fewer for the embedding)",
        _PARALLEL,
        "--first-stage-layers",
    ),
]
LastStageLayers = Annotated[
    int | None,
    option(
        "Layers of the last pipeline rank. (default: as many as the others, or fewer for the head)",
        _PARALLEL,
        "--last-stage-layers",
    ),
]
Engine = Annotated[str | None, option(f"{', '.join(ENGINES)}. (default: by --gpus and --zero)", _PARALLEL, "--engine")]
MicroBatchSize = Annotated[
    int | None, option("Sequences of a GPU in one forward pass. (default: 1)", _BATCH, "--micro-batch-size", "-b")
]
SeqLen = Annotated[
    str | None,
    option(
        "Tokens per sequence, also as 4k (4096) or 1M. (default: 2048, or the model's maximum if that is smaller)",
        _BATCH,
        "--seq-len",
        "-s",
    ),
]
GlobalBatchSize = Annotated[
    int | None, option("Sequences per step. (default: dp · micro-batch)", _BATCH, "--global-batch-size")
]
Padded = Annotated[
    bool,
    option("Batches have a padding mask: every attention takes a mask, and sdpa repeats k and v.", _BATCH, "--padded"),
]
ExpertImbalance = Annotated[
    float | None,
    option(
        "Tokens of the busiest expert divided by the average. (default: 1.0; no effect if every GPU has all experts)",
        _BATCH,
        "--expert-imbalance",
    ),
]
Optimizer = Annotated[
    str | None,
    option(f"{', '.join(EVERY_OPTIMIZER)}. (default: adamw)", METHOD, "--optimizer"),
]
OptimizerImplementation = Annotated[
    str | None,
    option(
        "foreach, fused, for-loop. (default: foreach; deepspeed, megatron: fused)",
        METHOD,
        "--optimizer-implementation",
    ),
]
ClipGradNorm = Annotated[
    bool, option("Clip gradients by their norm before the optimizer step.", METHOD, "--clip-grad-norm")
]
Recompute = Annotated[
    str | None,
    option(
        "none; full; op (torchtitan: keeps fused attention and every second matrix product); selective (megatron: "
        "recomputes core attention). (default: none)",
        METHOD,
        "--recompute",
    ),
]
RecomputeLayers = Annotated[
    int | None,
    option(
        "With --recompute full: recompute only this many first layers; with megatron, of each stage or chunk. (default: all)",
        METHOD,
        "--recompute-layers",
    ),
]
Attention = Annotated[
    str | None,
    option(
        "eager, sdpa, flash; with megatron also unfused. (default: sdpa if the model has it; megatron: flash on Ampere and Ada, "
        "unfused in fp32)",
        METHOD,
        "--attention",
    ),
]
CrossEntropy = Annotated[
    str | None,
    option(
        "eager, vocab-parallel, vocab-parallel-fused, fused, chunked, flash, liger. (default: by --kernels)",
        METHOD,
        "--cross-entropy",
    ),
]
Kernels = Annotated[
    str | None,
    option(
        "hf, fused (Liger-Kernel), megatron (with Transformer Engine). (default: hf; megatron with engine megatron)",
        METHOD,
        "--kernels",
    ),
]
Liger = Annotated[
    str | None,
    option(
        "Parts of Liger-Kernel in the layers: rope, rms_norm, swiglu or geglu, with commas or +. (default: all, with --kernels "
        "fused)",
        METHOD,
        "--liger",
    ),
]
Gpu = Annotated[
    str | None,
    option(
        "A name of `memcalc gpus`, the memory of another GPU (80GB), or auto (the GPU in this machine). Tells whether it fits; "
        "with a name, times too.",
        "Output",
        "--gpu",
    ),
]
NetworkGbps = Annotated[
    float | None,
    option(
        "Network per GPU in Gbit/s, in each direction. (default: as in NVIDIA's DGX with --gpu)",
        "Output",
        "--network-gbps",
    ),
]

GemmEfficiency = Annotated[
    float | None,
    option(
        "Share of the data sheet's FLOPs that matrix products reach. (default: see `memcalc gpus NAME`)",
        "Output",
        "--gemm-efficiency",
    ),
]
AttentionEfficiency = Annotated[
    float | None,
    option(
        "Share that fused attention reaches, half of the square counted. (default: see `memcalc gpus NAME`)",
        "Output",
        "--attention-efficiency",
    ),
]
MemoryEfficiency = Annotated[
    float | None,
    option(
        "Share of the memory's bandwidth that other kernels reach. (default: see `memcalc gpus NAME`)",
        "Output",
        "--memory-efficiency",
    ),
]


def model_of(name: str | None, model: str | None) -> str | None:
    """Return the model, given as an argument or by --model. Raise InputError if both are given."""
    if name is not None and model is not None:
        from memcalc.errors import InputError, one_line

        raise InputError(f"--model {one_line(model)}: contradicts {one_line(name)} before it; give one of them")
    return model if name is None else name


def setup_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setup options that were given on the command line, as `memcalc.estimate` takes them."""
    setup = {name: value for name, value in given.items() if value is not None and value is not False}
    setup |= {name: False for name in SWITCHES if given.get(name) is False}
    return setup | {name: tokens(value) for name, value in setup.items() if name in LENGTHS}


def tokens(text: str) -> int | str:
    """Return a sequence length in tokens: "4k" is 4096, "1M" is 1024 * 1024. Return other text unchanged."""
    from memcalc.units import KIB, MIB

    number, factor = text, 1
    if text[-1:] in ("k", "K", "m", "M"):
        number, factor = text[:-1], KIB if text[-1] in "kK" else MIB
    try:
        return int(number) * factor
    except ValueError:
        return text
