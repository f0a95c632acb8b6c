"""`memcalc estimate`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memcalc.cli import options as o

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

EPILOG = """Examples:

memcalc estimate llama-7b --zero 3 --gpus 8 --gpu a100-80gb

memcalc estimate llama-3-8b -s 32k --recompute full --gpu 80GB

memcalc estimate -m gpt2-xl -b 4 -s 1024 --precision fp32 --recompute full --rows

memcalc estimate -m llama-7b --gpus 16 --tp 4 --pp 2 --global-batch-size 32 --per-layer

memcalc estimate --params 7.5B --zero 2 --gpus 64 --json
"""


def estimate(
    ctx: typer.Context,
    name: o.Name = None,
    model: o.Model = None,
    params: o.Params = None,
    precision: o.Precision = None,
    grad_dtype: o.GradDtype = None,
    gpus: o.Gpus = None,
    gpus_per_node: o.GpusPerNode = None,
    zero: o.Zero = None,
    engine: o.Engine = None,
    dp: o.Dp = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    cp: o.Cp = None,
    cp_comm_type: o.CpCommType = None,
    ep: o.Ep = None,
    etp: o.Etp = None,
    pp_rank: o.PpRank = None,
    shard_group: o.ShardGroup = None,
    sequence_parallel: o.SequenceParallel = None,
    schedule: o.Schedule = None,
    virtual_stages: o.VirtualStages = None,
    reduce_bucket_size: o.ReduceBucketSize = None,
    max_live_parameters: o.MaxLiveParameters = None,
    max_reuse_distance: o.MaxReuseDistance = None,
    param_persistence_threshold: o.ParamPersistenceThreshold = None,
    prefetch_bucket_size: o.PrefetchBucketSize = None,
    sub_group_size: o.SubGroupSize = None,
    gradient_accumulation_fusion: o.GradientAccumulationFusion = None,
    attention_mask_in_dataloader: o.AttentionMaskInDataloader = None,
    sync_each_micro_batch: o.SyncEachMicroBatch = None,
    first_stage_layers: o.FirstStageLayers = None,
    last_stage_layers: o.LastStageLayers = None,
    micro_batch_size: o.MicroBatchSize = None,
    seq_len: o.SeqLen = None,
    global_batch_size: o.GlobalBatchSize = None,
    padded: o.Padded = False,
    expert_imbalance: o.ExpertImbalance = None,
    optimizer: o.Optimizer = None,
    optimizer_implementation: o.OptimizerImplementation = None,
    clip_grad_norm: o.ClipGradNorm = False,
    recompute: o.Recompute = None,
    recompute_layers: o.RecomputeLayers = None,
    attention: o.Attention = None,
    cross_entropy: o.CrossEntropy = None,
    kernels: o.Kernels = None,
    gpu: o.Gpu = None,
    network_gbps: o.NetworkGbps = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Exit with 1 if it does not fit --gpu, with 2 if nobody knows (--params).",
            rich_help_panel="Output",
        ),
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Every row with its formula.", rich_help_panel="Output")] = False,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="What one layer sends, by collective.", rich_help_panel="Output")
    ] = False,
    all_ranks: Annotated[
        bool,
        typer.Option("--all-ranks", help="What every pipeline rank needs and sends.", rich_help_panel="Output"),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.", rich_help_panel="Output")] = False,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="table, json, csv, markdown. (default: as --output is named; table)",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write to this file (.json, .csv, .md: in that format), or with - to stdout.",
            rich_help_panel="Output",
        ),
    ] = None,
) -> None:
    """What one training step needs, per GPU: memory by component and phase, communication, a verdict."""
    from memcalc.cli.output import Tables, answering, choose_format, write
    from memcalc.errors import InputError
    from memcalc.estimation.estimate import estimate as run

    kind = choose_format(json, format, output)
    model = o.model_of(name, model)
    given = o.setup_of({option: value for option, value in ctx.params.items() if option not in NOT_SETUP})
    if check and gpu is None:
        raise InputError("--check: needs --gpu, the GPU that it has to fit")
    if all_ranks and pp_rank is not None:
        raise InputError(f"--all-ranks: contradicts --pp-rank {pp_rank}; give one of them")
    if params is not None and model is None:
        _check_states_have(per_layer=per_layer, all_ranks=all_ranks)
    report = run(model, params=params, **given)
    if check:
        _check_known(report)
    status = 1 if check and report.fits is False else 0
    with answering(status):
        write(report, kind, tables=Tables(rows, per_layer, all_ranks), output=output)
    if status:
        raise typer.Exit(status)


def _check_states_have(**tables: bool) -> None:
    """InputError for a table that is asked for and that a bare number of parameters has nothing for."""
    from memcalc.estimation.sizing import NOT_OF_STATES
    from memcalc.inputs.options import refuse

    for name, asked in tables.items():
        if asked:
            refuse(name, True, NOT_OF_STATES)


def _check_known(report: Report) -> None:
    """InputError where nobody knows whether the report fits its GPU: --check has no status that would say so."""
    from memcalc.errors import InputError

    if report.gpu is not None and report.fits is None:
        from memcalc.report.verdict import states_words

        raise InputError(f"--check: {states_words(report, report.gpu)}; allowed: with --model in the place of --params")


NOT_SETUP = ("name", "model", "params", "check", "rows", "per_layer", "all_ranks", "json", "format", "output")
