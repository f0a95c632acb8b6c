"""From options to a setup. The refusals by name are in refusals.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.inputs.options import TWO_CHUNKS, Options, refuse
from memcalc.optimizers import load_optimizer
from memcalc.setup.batches import expert_imbalance_of, global_batch_size_of, seq_len_of
from memcalc.setup.chosen_engine import check_engine_of_model, checked_engine, with_engine
from memcalc.setup.fsdp1_options import fsdp1_options
from memcalc.setup.generation_checks import with_generation
from memcalc.setup.methods import (
    attention_of,
    cp_comm_type_of,
    cross_entropy_of,
    grad_dtype_of,
    implementation_of,
    kernels_of,
    liger_of,
    precision_of,
    sync_each_micro_batch_of,
    with_kernels_of_liger,
)
from memcalc.setup.offload_checks import check_offload, offload_optimizer_of
from memcalc.setup.optimizer_checks import (
    check_adam_mini,
    check_fused_backward,
    check_optimizer_of_layers,
)
from memcalc.setup.parameter_server_checks import servers_of
from memcalc.setup.precision_aware_options import precision_aware_options
from memcalc.setup.quantized_checks import check_quantized, quantized_options
from memcalc.setup.refusals import (
    check_megatron,
    check_modelled,
    check_pipeline,
)
from memcalc.setup.setup import Setup
from memcalc.setup.speeds import given_share, network_gbps
from memcalc.setup.task_checks import check_task, precompute_reference_of, with_adapters_of_trl
from memcalc.setup.tensor_dims_checks import check_grid, tp_depth_of
from memcalc.setup.tuning_checks import adapter_options, check_tuning, input_require_grads_of
from memcalc.setup.zero_sizes import nvme_sizes, overlap_comm_of, zero_plus_plus_of, zero_sizes
from memcalc.tasks.tasked import tasked

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.compression import Compression as _Compression


def resolve(options: Options, model: Model | None) -> Setup:
    """Return the setup that `options` mean for `model`; None stands for a bare number of parameters."""
    options = with_adapters_of_trl(with_kernels_of_liger(options))
    check_engine_of_model(options, model)
    if model is not None and model.model_type == "layers":
        from memcalc.setup.layers_checks import check_layers

        check_layers(options)
    options = with_generation(options, model, data_parallel_degree(options))
    model = None if model is None else tasked(model, with_engine(options, model))
    if model is not None:
        check_optimizer_of_layers(options, model)
    check_grid(options)
    dp = data_parallel_degree(options)
    engine = checked_engine(options, dp, model)
    precision = precision_of(options, engine, model)
    check_tuning(options, engine, precision, model)
    check_quantized(options, engine, model)
    check_task(options, engine, model)
    if options.reward_model is not None:
        check_reward_model(options)
    check_modelled(options, engine, model)
    check_offload(options, engine, model)
    if options.optimizer == "adam-mini":
        check_adam_mini(options, engine, model)
    if options.optimizer in ("lomo", "adalomo"):
        check_fused_backward(options, engine, precision, model)
    seq_len = None if model is None else seq_len_of(options, model)
    if options.autotp:
        from memcalc.setup.auto_tp_checks import check_auto_tp

        check_auto_tp(options, engine, model)
    if options.offload_activations != "none":
        from memcalc.tasks.offload_activations_checks import check_offloaded_activations

        check_offloaded_activations(options, engine, model)
    if options.reentrant_checkpoints:
        from memcalc.tasks.reentrant_checks import check_reentrant

        check_reentrant(options, engine, model)
    if options.neftune_alpha is not None:
        from memcalc.tasks.neftune_checks import check_neftune

        check_neftune(options, engine, model)
    if options.packing:
        from memcalc.tasks.packing_checks import check_packing

        check_packing(options, engine, precision, model)
    if options.lengths is not None:
        from memcalc.tasks.packing_checks import check_lengths

        check_lengths(options, seq_len)
    if engine == "colossalai":
        from memcalc.setup.tensor_dims_checks import check_colossalai

        check_colossalai(options, precision, seq_len, model)
    global_batch_size = global_batch_size_of(options, dp)
    if (options.stage_layers, options.microbatch_group_size, options.wgrad_deferral_limit) != (None, None, None):
        from memcalc.setup.stage_checks import check_stages, with_stages

        check_stages(options, engine, global_batch_size // (dp * options.micro_batch_size))
        options = with_stages(options, None if model is None else model.layers)
    if options.recompute_modules is not None:
        from memcalc.setup.recomputed_modules import with_modules

        options = with_modules(options, engine, model)
    if options.offload_modules is not None:
        from memcalc.setup.offloaded_modules import with_offloaded

        options = with_offloaded(options, engine, model)
    if engine == "megatron":
        check_megatron(options, seq_len, dp, global_batch_size // (dp * options.micro_batch_size), model)
    elif engine == "fsdp2" and options.pp > 1:
        check_pipeline(options, global_batch_size // (dp * options.micro_batch_size), model)
    kernels = kernels_of(options, precision, engine, model, seq_len)
    attention = None if model is None else attention_of(options, engine, model)
    if engine == "fsdp2" and options.sequence_parallel and model is not None and seq_len is not None:
        from memcalc.setup.shared_sequence_checks import check_sequence_parallel

        check_sequence_parallel(options, seq_len, str(attention), model)
    if engine == "fsdp2" and min(options.tp, options.ep) > 1 and seq_len is not None:
        from memcalc.layout.expert_parallel_checks import check_token_slices

        check_token_slices(options, seq_len)
    if engine == "deepspeed" and options.cp > 1 and model is not None and seq_len is not None:
        from memcalc.setup.shared_sequence_checks import check_context_parallel

        check_context_parallel(options, seq_len, str(attention), model)
    if engine == "fsdp2" and options.cp > 1 and model is not None and seq_len is not None:
        from memcalc.layout.context_parallel_checks import check_shared_sequences

        check_shared_sequences(options, precision, seq_len, str(attention), model)
    implementation = implementation_of(options, engine)
    shard_group = _shard_group(options, dp, engine)
    return Setup(
        gpus=options.gpus,
        gpus_per_node=options.gpus_per_node,
        dp=dp,
        tp=options.tp,
        pp=options.pp,
        cp=options.cp,
        ep=options.ep,
        etp=_expert_tensor_parallel(options, engine),
        pp_rank=_pp_rank(options),
        zero=options.zero,
        shard_group=shard_group,
        sequence_parallel=_sequence_parallel(options, engine),
        schedule=options.schedule,
        virtual_stages=2 if options.schedule in TWO_CHUNKS else options.virtual_stages,
        first_stage_layers=options.first_stage_layers,
        last_stage_layers=options.last_stage_layers,
        micro_batch_size=options.micro_batch_size,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        precision=precision,
        grad_dtype=grad_dtype_of(options, precision, engine, model),
        optimizer=options.optimizer,
        optimizer_implementation=implementation,
        clip_grad_norm=options.clip_grad_norm,
        recompute=options.recompute,
        cp_comm_type=cp_comm_type_of(options, engine),
        recompute_layers=options.recompute_layers,
        **zero_sizes(options, engine),
        overlap_comm=overlap_comm_of(options, engine),
        **zero_plus_plus_of(options, engine, precision, model),
        **nvme_sizes(options, engine),
        **precision_aware_options(options, engine, precision, model),
        gradient_accumulation_fusion=_megatrons(options, "gradient_accumulation_fusion", engine),
        attention_mask_in_dataloader=_megatrons(options, "attention_mask_in_dataloader", engine),
        sync_each_micro_batch=sync_each_micro_batch_of(options, engine),
        cublas_workspace_config=options.cublas_workspace_config,
        te_workspaces=_te_workspaces(options, engine),
        **fsdp1_options(options, engine),
        servers=servers_of(options, engine),
        **_compression(options, engine),
        attention=attention,
        cross_entropy=None if model is None else cross_entropy_of(options, kernels, precision, engine, model),
        padded=options.padded,
        expert_imbalance=expert_imbalance_of(options, model),
        kernels=kernels,
        liger=liger_of(options, kernels, model),
        engine=engine,
        freeze=options.freeze,
        **adapter_options(options),
        input_require_grads=input_require_grads_of(options, engine, model),
        **quantized_options(options, engine),
        task=options.task,
        precompute_reference=precompute_reference_of(options),
        completion_len=options.completion_len,
        num_generations=options.num_generations,
        steps_per_generation=options.steps_per_generation,
        num_iterations=options.num_iterations,
        beta=options.beta,
        offload_optimizer=offload_optimizer_of(options, engine),
        offload_params=options.offload_params,
        gpu=options.gpu,
        network_gbps=network_gbps(options),
        gemm_efficiency=given_share("gemm_efficiency", options),
        attention_efficiency=given_share("attention_efficiency", options),
        memory_efficiency=given_share("memory_efficiency", options),
        tp_dims=options.tp_dims,
        tp_depth=tp_depth_of(options),
        autotp=options.autotp,
        packing=options.packing,
        offload_activations=options.offload_activations,
        neftune_alpha=options.neftune_alpha,
        lengths=options.lengths,
        encoder_stages=options.encoder_stages,
        reward_model=options.reward_model,
        stage_layers=options.stage_layers,
        microbatch_group_size=None if options.microbatch_group_size == options.pp else options.microbatch_group_size,
        cp_exchange_size=options.cp_exchange_size,
        wgrad_deferral_limit=options.wgrad_deferral_limit,
        recompute_modules=options.recompute_modules,
        offload_modules=options.offload_modules,
        reentrant_checkpoints=bool(options.reentrant_checkpoints),
        rollout_batch_size=options.rollout_batch_size,
        num_mini_batches=options.num_mini_batches,
        flash_attention_version=_flash_version(options, attention, engine, model),
        **_fp8(options, engine, precision, seq_len, model),
    )


def _flash_version(options: Options, attention: str | None, engine: str, model: Model | None) -> int | None:
    """Return the version of flash-attn in transformers' layers; None without it."""
    if attention != "flash" and options.flash_attention_version is None:
        return None
    from memcalc.kernels.flash_version import flash_attention_version_of

    return flash_attention_version_of(options, attention, engine, model)


def check_reward_model(options: Options) -> None:
    """Raise InputError for a reward model that is not modelled. It is rare, and loads another model."""
    from memcalc.tasks import reward_model

    reward_model.check_reward_model(options)


def data_parallel_degree(options: Options) -> int:
    """Return the number of ranks that have the same part of the model. Raises InputError if the GPUs do not divide."""
    product = options.tp * options.pp * options.cp
    if options.gpus % product:
        refuse("gpus", options.gpus, f"is not divisible by {_degrees(options)}; allowed: a multiple of {product}")
    dp = options.gpus // product
    if options.dp is not None and options.dp != dp:
        shown = _degrees(options)
        gpus = "1 GPU leaves" if options.gpus == 1 else f"{options.gpus} GPUs{f' over {shown}' if shown else ''} leave"
        refuse("dp", options.dp, f"{gpus} dp = {dp}; allowed: {dp}")
    return dp


def _degrees(options: Options) -> str:
    """Return the degrees above one with their product: "tp 2·pp 4 = 8"."""
    axes = {"tp": options.tp, "pp": options.pp, "cp": options.cp}
    named = "·".join(f"{name} {degree}" for name, degree in axes.items() if degree > 1)
    return f"{named} = {options.tp * options.pp * options.cp}" if "·" in named else named


def _expert_tensor_parallel(options: Options, engine: str) -> int:
    """Return the tensor-parallel degree of experts: the layer's, but 1 with fsdp2's expert parallelism, which leaves
    experts whole."""
    if engine == "fsdp2" and options.ep > 1:
        return 1
    return options.etp or options.tp


def _megatrons(options: Options, name: str, engine: str) -> bool | None:
    """Return a switch of Megatron's that is on by default; None with another engine."""
    given: bool | None = getattr(options, name)
    if engine == "megatron":
        return given is not False
    if given is not None:
        refuse(name, given, "is an option of Megatron; allowed: with --engine megatron")
    return None


def _te_workspaces(options: Options, engine: str) -> int | None:
    if options.te_workspaces is not None and engine != "megatron":
        refuse("te_workspaces", options.te_workspaces, "are Transformer Engine's; allowed: with --engine megatron")
    return options.te_workspaces


def _sequence_parallel(options: Options, engine: str) -> bool:
    if options.sequence_parallel is None:
        return options.tp > 1 and engine == "megatron"
    return options.sequence_parallel


def _pp_rank(options: Options) -> int | None:
    if options.pp_rank is not None and options.pp_rank >= options.pp:
        refuse("pp_rank", options.pp_rank, f"allowed: 0 to {options.pp - 1} (pp is {options.pp})")
    return options.pp_rank if options.pp > 1 else 0


def _fp8(options: Options, engine: str, precision: str, seq_len: int | None, model: Model | None) -> dict[str, Any]:
    """Return the options of products in fp8, which few setups have."""
    if options.fp8_recipe is None and not options.fp8_param_gather:
        return {}
    from memcalc.setup.fp8_options import fp8_options

    return fp8_options(options, engine, precision, seq_len, model)


def _compression(options: Options, engine: str) -> _Compression:
    """Return the options of compressed communication, all None if nothing is compressed."""
    given = options.comm_hook, options.powersgd_rank, options.compression_phase
    if given == (None, None, None) and not load_optimizer(options.optimizer).compresses:
        return {"comm_hook": None, "powersgd_rank": None, "compression_phase": None}
    from memcalc.setup.compression import compression_options

    return compression_options(options, engine)


def _shard_group(options: Options, dp: int, engine: str) -> int:
    group, ranks = options.shard_group, dp * options.cp
    if group is None or group == ranks:
        return ranks
    divisors = ", ".join(str(n) for n in range(options.cp, ranks + 1, options.cp) if ranks % n == 0)
    if engine == "fsdp2" and group % options.cp:
        why = f"is not a multiple of cp {options.cp}, and FSDP2 shards over dp and cp together"
        refuse("shard_group", group, f"{why}; allowed: {divisors}")
    if ranks % group:
        refuse("shard_group", group, f"does not divide dp·cp = {ranks}; allowed: {divisors}")
    if engine == "megatron" and not options.zero:
        refuse("shard_group", group, f"with zero 0 nothing is sharded; allowed: {ranks} (all of dp·cp), or --zero 1")
    if engine == "deepspeed" and options.zero == 3:
        why = "DeepSpeed shards over all ranks of dp·cp; --zero-hpz-partition-size shares the weights once more (hpZ)"
        refuse("shard_group", group, f"{why}; allowed: {ranks}, or --engine fsdp2")
    if engine == "deepspeed":
        refuse("shard_group", group, f"DeepSpeed shards over all ranks of dp·cp; allowed: {ranks}, or --engine fsdp2")
    if engine in ("none", "ddp", "colossalai", "data-parallel", "parameter-server"):
        refuse("shard_group", group, f"engine {engine} shards nothing; allowed: {ranks} (all of dp·cp)")
    return group
