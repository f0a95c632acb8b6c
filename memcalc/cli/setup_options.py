"""The setup options as parameters of every command that takes them."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Final

from memcalc.cli import file_options as f
from memcalc.cli import knob_options as k
from memcalc.cli import options as o
from memcalc.cli import tuning_options as t
from memcalc.cli.help import HELP_ALL


def _setup(
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
    liger: o.Liger = None,
    freeze: t.Freeze = None,
    lora_rank: t.LoraRank = None,
    lora_targets: t.LoraTargets = None,
    lora_dropout: t.LoraDropout = None,
    lora_bias: t.LoraBias = None,
    adapter_dtype: t.AdapterDtype = None,
    dora: t.Dora = False,
    modules_to_save: t.ModulesToSave = None,
    input_require_grads: t.InputRequireGrads = None,
    base_dtype: t.BaseDtype = None,
    quantize: t.Quantize = None,
    double_quant: t.DoubleQuant = False,
    quantize_compute_dtype: t.QuantizeComputeDtype = None,
    prepare_kbit_training: t.PrepareKbitTraining = False,
    task: t.Task = None,
    precompute_reference: t.PrecomputeReference = None,
    completion_len: t.CompletionLen = None,
    num_generations: t.NumGenerations = None,
    steps_per_generation: t.StepsPerGeneration = None,
    num_iterations: t.NumIterations = None,
    beta: t.Beta = None,
    offload_optimizer: t.OffloadOptimizer = None,
    offload_params: t.OffloadParams = None,
    gpu: o.Gpu = None,
    network_gbps: o.NetworkGbps = None,
    gemm_efficiency: o.GemmEfficiency = None,
    attention_efficiency: o.AttentionEfficiency = None,
    memory_efficiency: o.MemoryEfficiency = None,
    reduce_bucket_size: o.ReduceBucketSize = None,
    max_live_parameters: o.MaxLiveParameters = None,
    max_reuse_distance: o.MaxReuseDistance = None,
    param_persistence_threshold: o.ParamPersistenceThreshold = None,
    prefetch_bucket_size: o.PrefetchBucketSize = None,
    sub_group_size: o.SubGroupSize = None,
    overlap_comm: o.OverlapComm = None,
    quantize_storage: k.QuantizeStorage = None,
    zero_quantized_weights: k.ZeroQuantizedWeights = False,
    zero_quantized_gradients: k.ZeroQuantizedGradients = False,
    zero_hpz_partition_size: k.ZeroHpzPartitionSize = None,
    nvme_optimizer_buffer_count: k.NvmeOptimizerBufferCount = None,
    nvme_buffer_count: k.NvmeBufferCount = None,
    nvme_buffer_size: k.NvmeBufferSize = None,
    nvme_max_in_cpu: k.NvmeMaxInCpu = None,
    nvme_threads: k.NvmeThreads = None,
    precision_aware_optimizer: k.PrecisionAwareOptimizer = False,
    main_params_dtype: k.MainParamsDtype = None,
    exp_avg_dtype: k.ExpAvgDtype = None,
    exp_avg_sq_dtype: k.ExpAvgSqDtype = None,
    fp8_recipe: k.Fp8Recipe = None,
    fp8_param_gather: k.Fp8ParamGather = False,
    gradient_accumulation_fusion: o.GradientAccumulationFusion = None,
    attention_mask_in_dataloader: o.AttentionMaskInDataloader = None,
    sync_each_micro_batch: o.SyncEachMicroBatch = None,
    cublas_workspace_config: k.CublasWorkspaceConfig = None,
    te_workspaces: k.TeWorkspaces = None,
    flash_attention_version: k.FlashAttentionVersion = None,
    stage_layers: k.StageLayers = None,
    microbatch_group_size: k.MicrobatchGroupSize = None,
    cp_exchange_size: k.CpExchangeSize = None,
    wgrad_deferral_limit: k.WgradDeferralLimit = None,
    recompute_modules: k.RecomputeModules = None,
    offload_modules: k.OffloadModules = None,
    tp_dims: k.TpDims = None,
    tp_depth: k.TpDepth = None,
    autotp: k.AutoTp = False,
    use_orig_params: k.UseOrigParams = None,
    backward_prefetch: k.BackwardPrefetch = None,
    forward_prefetch: k.ForwardPrefetch = None,
    servers: k.Servers = None,
    comm_hook: k.CommHook = None,
    powersgd_rank: k.PowerSgdRank = None,
    compression_phase: k.CompressionPhase = None,
    packing: t.Packing = False,
    offload_activations: t.OffloadActivations = None,
    neftune_alpha: t.NeftuneAlpha = None,
    reentrant_checkpoints: k.ReentrantCheckpoints = None,
    rollout_batch_size: t.RolloutBatchSize = None,
    num_mini_batches: t.NumMiniBatches = None,
    lengths: t.Lengths = None,
    encoder_stages: k.EncoderStages = None,
    reward_model: k.RewardModel = None,
    deepspeed: f.DeepSpeed = None,
    accelerate: f.Accelerate = None,
    training_args: f.TrainingArgs = None,
    megatron_args: f.MegatronArgs = None,
    torchtitan: f.Torchtitan = None,
    layers: f.Layers = None,
) -> None:
    """List the setup options in the order of the help."""


if TYPE_CHECKING:
    from collections.abc import Sequence

SETUP: Final = frozenset(inspect.signature(_setup).parameters)
FIRST: Final = ("topic", "name", "model", "params")
"""The parameters of a command that name its subject."""


def takes_setup(command: Any) -> Any:
    """Return the command with every setup option in the place of `**setup` in its signature, as typer reads it.

    The order is: the command's subject, the setup options, the command's own options, `--help-all`, and the knobs of one
    engine.
    """
    own = [*inspect.signature(command, eval_str=True).parameters.values()][:-1]
    setup = [*inspect.signature(_setup, eval_str=True).parameters.values()]
    knobs = [p for p in setup if _panel(p) == o.KNOBS]
    about = [p for p in own if p.name in FIRST]
    rest = [p for p in own if p.name not in FIRST]
    everything = [*about, *(p for p in setup if p not in knobs), *rest, _HELP_ALL, *knobs]
    command.__signature__ = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in everything])
    return command


def narrowed(command: Any, words: Sequence[str]) -> Any:
    """Return the command with only those setup options that the words name. The others are left out as if they were not given:
    typer takes as long to make them all as an estimate takes.

    If a word could be anything else, as in a usage error or a question for help, the command itself is returned.
    """
    signature: inspect.Signature | None = getattr(command, "__signature__", None)
    asked = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
    if signature is None:
        return command
    named = {name: p.name for p in signature.parameters.values() if p.name != HELP_ALL for name in _names(p)}
    if not asked <= named.keys():
        return command
    used = {named[word] for word in asked}
    kept = [p for p in signature.parameters.values() if p.name in used or p.name not in SETUP]

    @wraps(command)
    def run(**given: Any) -> Any:
        return command(**given)

    run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return run


def _names(parameter: inspect.Parameter) -> list[str]:
    """Return the words that name an option on the command line; none for an argument."""
    info = parameter.annotation.__metadata__[0]
    declared = (
        info.default,
        *(info.param_decls or ()),
    )  # typer takes the first name for a default, and corrects it later
    return [name for words in declared if isinstance(words, str) for name in words.split("/")]


def takes_lists(command: Any) -> Any:
    """Return the command with every setup option as `takes_setup` adds it, but as text: a comma list of values.

    A switch takes on, off or both (memcalc.cli.lists).
    """
    taken: inspect.Signature = takes_setup(command).__signature__
    command.__signature__ = taken.replace(
        parameters=[_as_text(p) if p.name in SETUP or p.name in FIRST else p for p in taken.parameters.values()]
    )
    return command


def _as_text(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the parameter of an option with words as its values; a switch has no off form any more."""
    from copy import copy

    info = copy(parameter.annotation.__metadata__[0])
    if hasattr(info, "param_decls") and info.param_decls:
        info.param_decls = tuple(name.split("/")[0] for name in info.param_decls)
    return parameter.replace(annotation=Annotated[str | None, info], default=None)


def _panel(parameter: inspect.Parameter) -> str | None:
    return parameter.annotation.__metadata__[0].rich_help_panel


_HELP_ALL: Final = inspect.Parameter(
    HELP_ALL,
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, o.option("Every option, with the knobs of each engine.", "Output", "--help-all")],
)
