"""The options of a setup, as given, and the values that each may have. memcalc.setup.resolved resolves what they
mean together.

They are checked by hand, not with pydantic: there are only these few kinds, and a planner resolves thousands of setups
a second.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple, NoReturn

from memcalc.errors import InputError, nearest, one_line
from memcalc.registry import ENGINES, EVERY_OPTIMIZER


class Options(NamedTuple):
    """Every setup option of the contract. None stands for the default, which may depend on other options."""

    gpus: int = 1
    gpus_per_node: int = 8
    dp: int | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    pp_rank: int | None = None
    cp_comm_type: str | None = None
    zero: int = 0
    shard_group: int | None = None
    sequence_parallel: bool | None = None
    schedule: str = "1f1b"
    virtual_stages: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    micro_batch_size: int = 1
    seq_len: int | None = None
    global_batch_size: int | None = None
    precision: str = "bf16-mixed"
    grad_dtype: str | None = None
    optimizer: str = "adamw"
    optimizer_implementation: str | None = None
    clip_grad_norm: bool = False
    recompute: str = "none"
    recompute_layers: int | None = None
    reduce_bucket_size: int | None = None
    max_live_parameters: int | None = None
    max_reuse_distance: int | None = None
    param_persistence_threshold: int | None = None
    prefetch_bucket_size: int | None = None
    sub_group_size: int | None = None
    overlap_comm: bool | None = None
    zero_quantized_weights: bool = False
    zero_quantized_gradients: bool = False
    zero_hpz_partition_size: int = 1
    nvme_optimizer_buffer_count: int | None = None
    nvme_buffer_count: int | None = None
    nvme_buffer_size: int | None = None
    nvme_max_in_cpu: int | None = None
    nvme_threads: int | None = None
    gradient_accumulation_fusion: bool | None = None
    precision_aware_optimizer: bool = False
    main_params_dtype: str | None = None
    exp_avg_dtype: str | None = None
    exp_avg_sq_dtype: str | None = None
    attention_mask_in_dataloader: bool | None = None
    sync_each_micro_batch: bool | None = None
    cublas_workspace_config: str | None = None
    te_workspaces: int | None = None
    flash_attention_version: int | None = None
    use_orig_params: bool | None = None
    backward_prefetch: str | None = None
    forward_prefetch: bool | None = None
    servers: int | None = None
    comm_hook: str | None = None
    powersgd_rank: int | None = None
    compression_phase: str | None = None
    attention: str | None = None
    cross_entropy: str | None = None
    padded: bool = False
    expert_imbalance: float = 1.0
    kernels: str | None = None
    liger: str | None = None
    engine: str | None = None
    freeze: str | None = None
    lora_rank: int = 0
    lora_targets: str | None = None
    lora_dropout: float | None = None
    lora_bias: str | None = None
    adapter_dtype: str | None = None
    dora: bool = False
    modules_to_save: str | None = None
    input_require_grads: bool | None = None
    base_dtype: str | None = None
    quantize: str = "none"
    double_quant: bool = False
    quantize_compute_dtype: str | None = None
    prepare_kbit_training: bool = False
    task: str = "pretrain"
    precompute_reference: bool | None = None
    completion_len: int | None = None
    num_generations: int | None = None
    steps_per_generation: int | None = None
    num_iterations: int | None = None
    beta: float | None = None
    offload_optimizer: str = "none"
    offload_params: str = "none"
    gpu: str | None = None
    network_gbps: float | None = None
    gemm_efficiency: float | None = None
    attention_efficiency: float | None = None
    memory_efficiency: float | None = None
    tp_dims: str = "1"
    tp_depth: int | None = None
    autotp: bool = False
    packing: bool = False
    offload_activations: str = "none"
    neftune_alpha: float | None = None
    lengths: str | None = None
    quantize_storage: str | None = None
    encoder_stages: int | None = None
    reward_model: str | None = None
    stage_layers: str | None = None
    microbatch_group_size: int | None = None
    cp_exchange_size: int | None = None
    wgrad_deferral_limit: int | None = None
    recompute_modules: str | None = None
    offload_modules: str | None = None
    reentrant_checkpoints: bool | None = None
    fp8_recipe: str | None = None
    fp8_param_gather: bool = False
    rollout_batch_size: int | None = None
    num_mini_batches: int | None = None


PLUS_PLUS: Final[Mapping[str, Any]] = {
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "zero_hpz_partition_size": 1,
}
"""The options of ZeRO++, and what each is if that part is off."""
EFFICIENCIES: Final = ("gemm_efficiency", "attention_efficiency", "memory_efficiency")
_DEGREE: Final = (1, 10**6)
CHOICES: Final[dict[str, Collection[str]]] = {
    "schedule": (
        "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev", "naive", "dapple", "dapple-b", "pipedream",
        "pipedream-2bw", "pipedream-flush", "chimera", "dualpipe",
    ),
    "cp_comm_type": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "precision": (
        "fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed", "bf16-autocast", "fp16-autocast", "fp8-mixed",
    ),
    "grad_dtype": ("fp32", "bf16", "fp16"),
    "fp8_recipe": ("delayed", "tensorwise", "blockwise", "mxfp8"),
    "optimizer": EVERY_OPTIMIZER,
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "bf16", "fp16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "bf16", "fp16", "fp8"),
    "optimizer_implementation": ("foreach", "fused", "for-loop"),
    "recompute": ("none", "selective", "op", "full"),
    "attention": ("eager", "sdpa", "flash", "unfused"),
    "cross_entropy": ("eager", "vocab-parallel", "vocab-parallel-fused", "fused", "chunked", "flash", "liger"),
    "lora_bias": ("none", "all", "lora_only"),
    "adapter_dtype": ("fp32", "bf16", "fp16"),
    "base_dtype": ("fp32", "bf16", "fp16"),
    "quantize": ("none", "nf4", "fp4", "int8"),
    "quantize_compute_dtype": ("fp32", "bf16", "fp16"),
    "quantize_storage": ("uint8", "fp32", "bf16", "fp16"),
    "task": ("pretrain", "sft", "dpo", "kto", "ppo", "grpo"),
    "offload_optimizer": ("none", "cpu", "nvme"),
    "offload_params": ("none", "cpu", "nvme"),
    "backward_prefetch": ("pre", "post", "none"),
    "comm_hook": ("fp16", "bf16", "powersgd", "batched-powersgd"),
    "compression_phase": ("warmup", "compressed"),
    "offload_activations": ("none", "cpu"),
    "kernels": ("hf", "fused", "megatron"),
    "tp_dims": ("1", "2", "2.5", "3"),
    "engine": ENGINES,
}  # fmt: skip
"""The allowed names of each option that takes one of a few names."""
SCHEDULE_NAMES: Final = {"pipedream-flush": "1f1b"}
"""Other names of schedules: PipeDream-Flush is 1F1B (Narayanan et al. 2021, arXiv 2006.09503, section 3.2)."""
TWO_CHUNKS: Final = ("zbv", "dualpipev", "chimera", "dualpipe")
"""The schedules with two model chunks on each rank."""
WHOLE: Final[dict[str, tuple[int, int]]] = {
    **dict.fromkeys(
        (
            "gpus",
            "gpus_per_node",
            "dp",
            "tp",
            "pp",
            "cp",
            "ep",
            "etp",
            "shard_group",
            "virtual_stages",
            "tp_depth",
            "cp_exchange_size",
        ),
        _DEGREE,
    ),
    **dict.fromkeys(("first_stage_layers", "last_stage_layers", "recompute_layers", "encoder_stages"), (1, 10**6)),
    **dict.fromkeys(("reduce_bucket_size", "sub_group_size"), (1, 10**15)),
    **dict.fromkeys(
        (
            "max_live_parameters",
            "max_reuse_distance",
            "param_persistence_threshold",
            "prefetch_bucket_size",
        ),
        (0, 10**15),
    ),
    "zero_hpz_partition_size": _DEGREE,
    "microbatch_group_size": (1, 10**6),
    "wgrad_deferral_limit": (0, 10**6),
    **dict.fromkeys(("nvme_optimizer_buffer_count", "nvme_buffer_count"), (1, 10**6)),
    "nvme_buffer_size": (1, 10**15),
    "nvme_max_in_cpu": (0, 10**15),
    "nvme_threads": (1, 1024),
    "pp_rank": (0, 10**6),
    "servers": (1, 10**6),
    "lora_rank": (0, 10**6),
    "te_workspaces": (0, 64),
    "flash_attention_version": (2, 3),
    "powersgd_rank": (1, 10**6),
    "zero": (0, 3),
    "micro_batch_size": (1, 10**7),
    "seq_len": (1, 10**8),
    "completion_len": (1, 10**8),
    "num_generations": (2, 10**6),
    **dict.fromkeys(("steps_per_generation", "num_iterations", "rollout_batch_size", "num_mini_batches"), (1, 10**6)),
    "global_batch_size": (1, 10**10),
}
"""The least and the largest value of each integer option."""
TEXTS: Final[dict[str, str]] = {
    "freeze": "names of parts with commas, such as embeddings,first:4",
    "modules_to_save": "names of modules with commas, such as lm_head,embed_tokens",
    "lengths": "lengths with shares, such as 512:0.6,2048:0.4, or a file with one length a line",
    "liger": "parts of Liger-Kernel with commas or +, such as rope,rms_norm",
    "recompute_modules": "names of modules with commas, such as layernorm,moe_act",
    "offload_modules": "names of modules with commas, such as core_attn,expert_fc1",
    "stage_layers": "the layers of each stage with commas, such as 3,2,2,1",
    "lora_targets": "default, all-linear, or names of linear layers with commas, such as q_proj,v_proj",
}
"""The options that take words of their own, with what they allow."""
FLAGS: Final = (
    "sequence_parallel",
    "padded",
    "clip_grad_norm",
    "overlap_comm",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "gradient_accumulation_fusion",
    "precision_aware_optimizer",
    "fp8_param_gather",
    "attention_mask_in_dataloader",
    "sync_each_micro_batch",
    "use_orig_params",
    "forward_prefetch",
    "input_require_grads",
    "double_quant",
    "prepare_kbit_training",
    "precompute_reference",
    "dora",
    "autotp",
    "packing",
    "reentrant_checkpoints",
)


NOT_YET: Final = "is not modelled by this version; allowed: "


def refuse(field: str, value: object, allowed: str) -> NoReturn:
    """Raise InputError in the one form that all options have."""
    shown = ("off", "on")[value] if isinstance(value, bool) else one_line(value)
    raise InputError(f"{option_name(field)} {shown}: {allowed}")


def option_name(field: str) -> str:
    """Return the command-line spelling of a field."""
    return "--" + field.replace("_", "-")


def check_options(given: Mapping[str, Any]) -> Options:
    """Return `given` as Options; None counts as left out. Raises InputError that names the option, the value and what
    is allowed."""
    if isinstance(given.get("tp_dims"), (int, float)) and not isinstance(given["tp_dims"], bool):
        given = {**given, "tp_dims": f"{given['tp_dims']:g}"}  # 2, 2.0 and 2.5 as text
    for name, value in given.items():
        if name not in Options._fields:
            close = nearest(name, Options._fields)
            hint = f"; did you mean {', '.join(map(option_name, close))}?" if close else ""
            raise InputError(f"{option_name(one_line(name))}: unknown option{hint}")
        if value is None:
            continue
        allowed = _what_is_allowed(name, value)
        if allowed is not None:
            raise InputError(f"{option_name(name)} {one_line(value)}: {allowed}")
    named = {name: value for name, value in given.items() if value is not None}
    if named.get("engine") in ("fsdp2", "fsdp1"):
        named.setdefault("zero", 3)  # fully_shard by itself always shards all three
    if named.get("schedule") in SCHEDULE_NAMES:
        named["schedule"] = SCHEDULE_NAMES[named["schedule"]]
    if "gpu" in named:
        from memcalc.inputs.gpu import AUTO

        if named["gpu"] == AUTO:
            from memcalc.inputs.local_gpu import local_gpu

            named["gpu"] = local_gpu()
    return Options(**named)


def _what_is_allowed(name: str, value: Any) -> str | None:
    """Return what the option allows if it does not allow `value`; None if it does."""
    if name in CHOICES:
        choices = CHOICES[name]
        if value in choices:
            return None
        close = nearest(value, choices, most=1) if isinstance(value, str) else []
        return f"allowed: {', '.join(choices)}" + (f" (did you mean {close[0]}?)" if close else "")
    if name in WHOLE:
        low, high = WHOLE[name]
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if is_whole and low <= value <= high:
            return None
        short_form = " (4k is 4096)" if isinstance(value, str) and name in ("seq_len", "completion_len") else ""
        return f"allowed: a whole number from {low} to {high}{short_form}"
    if name in FLAGS:
        return None if isinstance(value, bool) else "allowed: true, false"
    if name == "expert_imbalance":
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if is_number and 1 <= value <= 10**6 else "allowed: a number from 1 up"
    if name == "lora_dropout":
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if is_number and 0 <= value < 1 else "allowed: a number from 0 up, below 1"
    if name == "beta":
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if is_number and 0 <= value <= 10**6 else "allowed: a number from 0 up"
    if name == "neftune_alpha":
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if is_number and 0 < value <= 10**6 else "allowed: a number above 0, such as 5"
    if name == "network_gbps":
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if is_number and 0 < value <= 10**6 else "allowed: a number above 0, at most 1000000"
    if name in EFFICIENCIES:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if is_number and 0 < value <= 1 else "allowed: a share of the data sheet's rate, above 0, at most 1"
    if name == "cublas_workspace_config":
        from memcalc.inputs.cublas import WORKSPACE_CONFIG, workspace_config

        return (
            None if isinstance(value, str) and workspace_config(value) is not None else f"allowed: {WORKSPACE_CONFIG}"
        )
    if name in TEXTS:
        return None if isinstance(value, str) and value.strip() else f"allowed: {TEXTS[name]}"
    return None if isinstance(value, str) else "allowed: a name of `memcalc gpus`, a memory (80GB), auto"
