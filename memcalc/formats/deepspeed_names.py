"""The names of DeepSpeed's JSON: keys that change nothing here, keys that it knows, and its optimizers.

Source: deepspeed/runtime/constants.py, runtime/config.py, runtime/zero/config.py (0.19.8), and older versions' names.
"""

from __future__ import annotations

from typing import Final

OPTIMIZERS: Final = {
    "adam": "adamw", "adamw": "adamw", "torchadam": "adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw",
    "lion": "lion", "muon": "muon", "sgd": "sgd", "lamb": "lamb", "onebitadam": "onebit-adam", "onebitlamb": "onebit-lamb",
    "zerooneadam": "zero-one-adam",
}  # fmt: skip
"""Optimizers of DeepSpeed and torch in lower case -> memcalc's. DeepSpeed's Adam is AdamW unless adam_w_mode is off."""
OWN_OPTIMIZERS: Final = {
    "lamb": "Lamb", "onebit-adam": "OneBitAdam", "onebit-lamb": "OneBitLamb", "zero-one-adam": "ZeroOneAdam",
}  # fmt: skip
"""The optimizers that run in DeepSpeed's engine alone, and the types that they have in its JSON."""
IGNORED: Final = (
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "scheduler", "tensorboard", "wandb",
    "csv_monitor", "comet", "comms_logger", "monitor_config", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "gradient_average", "aio", "nebula",
    "checkpoint", "load_universal_checkpoint", "use_node_local_storage", "dataloader_drop_last", "disable_allgather",
    "disable_python_gc", "vocabulary_size", "log_level", "hybrid_engine", "autotuning", "pipeline", "timers", "comms_config",
    "seq_parallel_communication_data_type", "use_data_before_expert_parallelism", "weight_quantization",
    "zero_optimization_stage", "seed", "datastates_ckpt", "eigenvalue",
    "managed_gradient_accumulation", "expert_parallel", "train_iters", "local_rank", "fp32_allreduce", "profile_backward",
    "_comment", "comment", "zero_allow_comm_data_type_fp32",
)  # fmt: skip
PRECISION_KEYS: Final = (
    "enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
    "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads", "bf16_master_weights_and_grads",
    "bf16_optimizer_states", "immediate_grad_update", "check_grad_overflow", "fp16_scale_tolerance", "fp16_opt_level",
)  # fmt: skip
REMOVED: Final = ("progressive_layer_drop", "quantize_training")
"""Sections of older versions, which change what a step computes."""
SECTIONS: Final = (
    "activation_checkpointing", "amp", "torch_autocast", "flops_profiler", "compile", "curriculum_learning",
    "data_efficiency", "elasticity", "compression_training", "sparse_attention", "data_types", "tensor_parallel",
)  # fmt: skip
CHECKPOINTING: Final = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
ZERO_IGNORED: Final = (
    "allgather_partitions", "allgather_bucket_size", "compute_grad_norm",
    "load_from_fp32_weights", "elastic_checkpoint", "gather_16bit_weights_on_model_save",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters",
    "legacy_stage1", "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings",
    "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module", "mics_hierarchical_params_gather",
)  # fmt: skip
NOT_MODELLED: Final[tuple[tuple[str, object, tuple[int, ...]], ...]] = (
    ("stage3_model_persistence_threshold", 2**63 - 1, (3,)),
    ("model_persistence_threshold", 2**63 - 1, (3,)),
    ("stage3_use_all_reduce_for_fetch_params", False, (3,)),
    ("stage3_module_granularity_threshold", 0, (3,)),
    ("stage3_allgather_sequential", False, (3,)),
    ("use_multi_rank_bucket_allreduce", True, (1, 2)),
)
"""Keys of zero_optimization that change memory or communication and have no option: their default, and the stages that use
them."""
ZERO_KEYS: Final = (
    *ZERO_IGNORED, *(key for key, _, _ in NOT_MODELLED), "stage", "contiguous_gradients", "reduce_scatter",
    "reduce_bucket_size", "overlap_comm", "offload_param",
    "offload_optimizer", "zenflow", "sub_group_size", "cpu_offload_param", "cpu_offload_use_pin_memory", "cpu_offload",
    "prefetch_bucket_size", "stage3_prefetch_bucket_size", "param_persistence_threshold",
    "stage3_param_persistence_threshold", "model_persistence_threshold", "stage3_model_persistence_threshold",
    "max_live_parameters", "stage3_max_live_parameters", "max_reuse_distance", "stage3_max_reuse_distance",
    "module_granularity_threshold", "stage3_module_granularity_threshold", "use_all_reduce_for_fetch_params",
    "stage3_use_all_reduce_for_fetch_params", "allgather_sequential", "stage3_allgather_sequential",
    "round_robin_gradients", "parameter_alignment", "zero_hpz_partition_size", "zero_quantized_weights",
    "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "mics_shard_size", "memory_efficient_linear",
)  # fmt: skip
OFFLOAD_KEYS: Final = (
    "device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "pipeline_read", "pipeline_write",
    "pipeline", "fast_init", "ratio", "super_offload", "cpuadam_cores_perc",
)  # fmt: skip
OF_FILES: Final = {
    "offload_optimizer": {"buffer_count": "nvme_optimizer_buffer_count"},
    "offload_param": {
        "buffer_count": "nvme_buffer_count", "buffer_size": "nvme_buffer_size", "max_in_cpu": "nvme_max_in_cpu",
    },
}  # fmt: skip
"""The sizes of a section that swaps to files, and memcalc's options."""
FILE_SIZES: Final = {
    "nvme_optimizer_buffer_count": 4, "nvme_buffer_count": 5, "nvme_buffer_size": 100_000_000, "nvme_max_in_cpu": 1_000_000_000,
    "nvme_threads": 1,
}  # fmt: skip
"""DeepSpeed's defaults of them (runtime/zero/offload_config.py, runtime/swap_tensor/constants.py)."""
NVME_PATH: Final = "/local_nvme"
"""A stand-in for the folder on NVMe, which is the machine's."""
