"""The options of a setup that a written file leaves to somebody else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from memcalc.inputs.options import EFFICIENCIES, Options
from memcalc.kernels import DEFAULT_LOSS
from memcalc.optimizers import load_optimizer
from memcalc.tasks import GENERATIONS, OF_TRL, PREFERENCE

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_ADAPTERS: Final = "peft makes the adapters, called by the script"
_LOADING: Final = "the script loads the model so, with bitsandbytes"
_WHY: Final[Mapping[str, str]] = {
    "pp_rank": "it is no setting of a run",
    "compression_phase": "a run has both",
    **dict.fromkeys(("comm_hook", "powersgd_rank"), "the script registers the hook (register_comm_hook)"),
    "expert_imbalance": "the router and the data decide it",
    "seq_len": "the data decides it",
    "padded": "the data decides it",
    "recompute": "a switch of the model, which the script sets (gradient_checkpointing_enable)",
    "reentrant_checkpoints": "the script sets it with the recomputation of layers (use_reentrant)",
    "recompute_layers": "a switch of each layer, which the script sets",
    **dict.fromkeys(
        ("lora_rank", "lora_targets", "lora_dropout", "lora_bias", "adapter_dtype", "dora", "modules_to_save"), _ADAPTERS
    ),
    **dict.fromkeys(("quantize", "double_quant", "quantize_compute_dtype", "quantize_storage"), _LOADING),
    **dict.fromkeys(("gpus_per_node", "gpu", "network_gbps", *EFFICIENCIES), "the machine decides it"),
}  # fmt: skip
_OTHERWISE: Final = "the script decides it"


def unsaid(
    setup: Setup, model: Model, said: Collection[str], takes: Mapping[str, Any], why: Mapping[str, str]
) -> dict[str, str]:
    """Return the options in which a setup is not what a file means, each with a reason.

    `said`: the options that the file says, or that follow from what it says. `takes`: what its tool takes for others,
    where that is not what they are by default. `why`: the reasons that are the format's own.
    """
    without = {**_without(setup, model), **takes}
    reasons = {**_WHY, **why}
    return {
        name: reasons.get(name, _OTHERWISE)
        for name in Options._fields
        if name not in said and name != "dp" and getattr(setup, name) not in (None, without[name])
    }


def _without(setup: Setup, model: Model) -> dict[str, Any]:
    """Return the value that each option has where it is not given, beside the others of the setup."""
    own = {
        "pp_rank": 0 if setup.pp == 1 else None,
        "zero": 3 if setup.engine in ("fsdp2", "fsdp1") else 0,
        "etp": 1 if setup.engine == "fsdp2" and setup.ep > 1 else setup.tp,
        "shard_group": setup.dp * setup.cp,
        "sequence_parallel": setup.tp > 1 and setup.engine == "megatron",
        "cp_comm_type": {"megatron": "p2p", "fsdp2": "all_gather", "deepspeed": "a2a"}.get(setup.engine),
        "global_batch_size": setup.dp * setup.micro_batch_size,
        "grad_dtype": _grad_dtype(setup),
        "optimizer_implementation": _implementation(setup),
        "overlap_comm": False,
        "gradient_accumulation_fusion": True,
        "attention_mask_in_dataloader": True,
        "sync_each_micro_batch": False,
        "use_orig_params": True,
        "backward_prefetch": "pre",
        "forward_prefetch": False,
        "servers": 1,
        "powersgd_rank": 1,
        "compression_phase": "compressed",
        "attention": _attention(setup, model),
        "cross_entropy": "chunked" if setup.task in OF_TRL else DEFAULT_LOSS[setup.kernels],
        "kernels": "megatron" if setup.engine == "megatron" or setup.runs_gpt_model else "hf",
        "liger": _liger(setup, model),
        "lora_targets": "default",
        "lora_dropout": 0.0,
        "lora_bias": "none",
        "adapter_dtype": _adapter_dtype(setup),
        "input_require_grads": _input_require_grads(setup, model),
        "quantize_storage": setup.compute_dtype.name if _shares_codes(setup) else "uint8",
        "quantize_compute_dtype": None if setup.quantize == "int8" else setup.precision.split("-")[0],
        "precompute_reference": False,
        "num_generations": GENERATIONS if setup.task == "grpo" else None,
        "reentrant_checkpoints": False,
        "flash_attention_version": 2,
        "network_gbps": _network(setup),
    }
    return {**Options._field_defaults, **own}


def _adapter_dtype(setup: Setup) -> str:
    if setup.engine == "megatron":
        return setup.compute_dtype.name
    return "bf16" if setup.task in ("sft", *PREFERENCE) and setup.quantize != "none" else "fp32"


def _shares_codes(setup: Setup) -> bool:
    return setup.engine == "fsdp2" or (setup.engine == "deepspeed" and setup.zero == 3)


def _grad_dtype(setup: Setup) -> str:
    half = "fp32" if setup.precision.endswith("-autocast") else setup.precision.split("-")[0]
    if setup.engine in ("fsdp2", "fsdp1") and setup.precision.endswith("-mixed"):
        return "fp32"
    if setup.engine == "deepspeed" and setup.pp > 1:
        return "fp32" if setup.zero else "bf16"
    return "fp32" if setup.engine == "megatron" and half == "bf16" else half


def _implementation(setup: Setup) -> str:
    allowed = load_optimizer(setup.optimizer).implementations
    return "fused" if setup.engine in ("deepspeed", "megatron") and "fused" in allowed else allowed[0]


def _attention(setup: Setup, model: Model) -> str | None:
    """Return the attention that runs where none is asked for; None where that depends on the GPU."""
    if setup.packing:
        return "flash"
    if setup.engine == "megatron":
        return "unfused" if setup.precision == "fp32" else "sdpa" if setup.gpu is None else None
    return "flash" if setup.runs_gpt_model else model.program.attention_kinds[0]


def _liger(setup: Setup, model: Model) -> str | None:
    if setup.kernels != "fused":
        return None
    from memcalc.kernels.liger_parts import parts_of  # Liger's tables are long

    return ",".join(parts_of(model.model_type))


def _input_require_grads(setup: Setup, model: Model) -> bool:
    trains_a_part = setup.freeze is not None or setup.lora_rank > 0
    checkpoints = setup.recompute in ("full", "op") and setup.engine != "megatron"
    return trains_a_part and checkpoints and model.support.batch == "tokens"


def _network(setup: Setup) -> float | None:
    if setup.gpu is None:
        return None
    from memcalc.inputs.gpu import load_gpu

    network = load_gpu(setup.gpu).network
    return None if network is None else network.value
