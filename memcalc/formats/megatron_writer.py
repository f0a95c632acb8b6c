"""A setup as Megatron-LM's arguments: a command line with one option on each line.

Source: validate_args of megatron/training/arguments.py, core/transformer/transformer_config.py, NVIDIA/Megatron-LM at
d98e8a64.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from memcalc.families.base.architecture import architecture_of
from memcalc.formats.megatron_model_writer import Flags, model_flags
from memcalc.formats.unsaid import unsaid
from memcalc.formats.written import Written
from memcalc.inputs.options import refuse
from memcalc.megatron.schedules import layers_of_chunks

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_OTHER_FORMATS: Final = {
    "none": "accelerate, torchtitan", "ddp": "accelerate, torchtitan", "fsdp2": "accelerate, torchtitan",
    "deepspeed": "deepspeed, accelerate", "fsdp1": "accelerate",
}  # fmt: skip
_CLIPS_AT: Final = 1.0
_BACKENDS: Final = {"sdpa": "fused", "flash": "flash", "unfused": "unfused"}
"""AttnBackend of each attention of Transformer Engine."""
_SCHEDULES: Final = ("1f1b", "interleaved")
_SAID: Final = frozenset({
    "engine", "tp", "pp", "cp", "cp_comm_type", "ep", "zero", "sequence_parallel", "schedule", "virtual_stages",
    "first_stage_layers", "last_stage_layers", "micro_batch_size", "seq_len", "global_batch_size", "precision",
    "grad_dtype", "clip_grad_norm", "recompute", "attention", "cross_entropy", "gradient_accumulation_fusion",
    "attention_mask_in_dataloader", "shard_group", "cp_exchange_size", "wgrad_deferral_limit", "stage_layers",
    "microbatch_group_size", "precision_aware_optimizer", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    "recompute_modules", "offload_modules", "fp8_recipe", "fp8_param_gather",
})  # fmt: skip
"""The options that the arguments say, or that follow from those."""
_OF_STATES: Final = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_WHY: Final[Mapping[str, str]] = {
    "gpus": "the launcher says it: torchrun --nnodes --nproc-per-node",
    "gpus_per_node": "the launcher says it: torchrun --nproc-per-node",
    "optimizer": "Megatron's adam decays weights as AdamW does",
    "etp": "a model without experts has none to split",
    "recompute_layers": "it is all layers of a stage, which --recompute-granularity full recomputes",
    "cublas_workspace_config": "the job's environment says it: CUBLAS_WORKSPACE_CONFIG",
}


def write(setup: Setup, model: Model) -> Written:
    """Return the arguments. Raises InputError for another engine, and for what Megatron-LM refuses."""
    _check(setup)
    of_model = model_flags(setup, model)
    is_routed = "--num-experts" in of_model
    flags = {
        **of_model,
        **_layout(setup, is_routed=is_routed),
        **_stages(setup, model),
        **_step(setup),
        **_optimizer(setup),
        **_precision(setup),
        **_recomputation(setup),
        **_offloading(setup),
        **_kernels(setup, is_routed=is_routed),
    }
    return Written(_text(flags), _unsaid(setup, model, is_routed=is_routed))


def _check(setup: Setup) -> None:
    if setup.engine != "megatron":
        others = f"memcalc emit {_OTHER_FORMATS[setup.engine]}"
        refuse("engine", setup.engine, f"is not what Megatron-LM's arguments describe; allowed: megatron, or {others}")
    if setup.schedule not in _SCHEDULES:
        why = "is no schedule of Megatron-LM's"
        refuse("schedule", setup.schedule, f"{why}; allowed: {', '.join(_SCHEDULES)}")


# --- GPUs


def _layout(setup: Setup, *, is_routed: bool) -> Flags:
    """Return the parallel degrees above one. Experts are split as all else is unless they have a degree of their own."""
    degrees = {
        "--tensor-model-parallel-size": setup.tp,
        "--pipeline-model-parallel-size": setup.pp,
        "--context-parallel-size": setup.cp,
        "--expert-model-parallel-size": setup.ep,
    }
    return {
        **{flag: degree if degree > 1 else None for flag, degree in degrees.items()},
        "--expert-tensor-parallel-size": setup.etp if is_routed and setup.etp != setup.tp else None,
        "--sequence-parallel": setup.sequence_parallel or None,
        "--cp-comm-type": setup.cp_comm_type,
        "--hierarchical-context-parallel-sizes": _levels(setup),
    }


def _levels(setup: Setup) -> str | None:
    """Return the ranks that exchange heads and those of a ring; None without both."""
    return None if setup.cp_exchange_size is None else f"{setup.cp_exchange_size} {setup.cp // setup.cp_exchange_size}"


def _stages(setup: Setup, model: Model) -> Flags:
    """Return the model chunks of a rank and the layers of the ends, or the layers of every stage. Layers that do not divide
    need the embedding, the loss or both to count as layers."""
    limit = setup.wgrad_deferral_limit
    group: Flags = {
        "--microbatch-group-size-per-virtual-pipeline-stage": setup.microbatch_group_size,
        "--defer-embedding-wgrad-compute": limit is not None or None,
        "--wgrad-deferral-limit": limit or None,
    }
    if setup.stage_layers is not None:
        predictions = architecture_of(model.model_type, model.program.config).mtp
        return {"--pipeline-model-parallel-layout": _written(setup.stage_layers, predictions), **group}
    layers, chunks, first, last = model.layers, setup.virtual_stages, setup.first_stage_layers, setup.last_stage_layers
    counts = layers_of_chunks(layers, setup.pp * chunks, first, last)
    uneven = setup.pp > 1 and first is None and last is None
    return {
        "--num-virtual-stages-per-pipeline-rank": chunks if chunks > 1 else None,
        "--decoder-first-pipeline-num-layers": first,
        "--decoder-last-pipeline-num-layers": last,
        "--account-for-embedding-in-pipeline-split": (uneven and counts[0] < max(counts)) or None,
        "--account-for-loss-in-pipeline-split": (uneven and counts[-1] < max(counts)) or None,
        **group,
    }


def _written(stages: str, predictions: int) -> str:
    """Return a layout such as Et*3|t*2|tmL: the embedding, the layers, those of multi-token prediction, and the loss."""
    layers = ["" if count == "0" else "t" if count == "1" else f"t*{count}" for count in stages.split(",")]
    return "E" + "|".join(layers) + "m" * predictions + "L"


# --- the step


def _step(setup: Setup) -> Flags:
    return {
        "--micro-batch-size": setup.micro_batch_size,
        "--global-batch-size": setup.global_batch_size,
        "--seq-length": setup.seq_len,
        "--no-create-attention-mask-in-dataloader": setup.attention_mask_in_dataloader is False or None,
    }


def _optimizer(setup: Setup) -> Flags:
    """Return how states are sharded, and the clipping, which Megatron does unless the norm is 0."""
    muon = setup.optimizer == "muon"
    return {
        "--optimizer": ("dist_muon" if setup.zero else "muon") if muon else None,
        "--use-distributed-optimizer": (setup.zero == 1 and not muon) or None,
        "--num-distributed-optimizer-instances": setup.replicas if setup.zero and setup.replicas > 1 else None,
        **_precision_aware(setup),
        "--clip-grad": _CLIPS_AT if setup.clip_grad_norm else 0.0,
    }


def _precision_aware(setup: Setup) -> Flags:
    """Return the dtypes of the precision-aware optimizer's states, fp32 being Megatron's default."""
    if not setup.precision_aware_optimizer:
        return {}
    dtypes = {name: getattr(setup, name) for name in _OF_STATES}
    keys = {f"--{name.replace('_', '-')}": None if dtype == "fp32" else dtype for name, dtype in dtypes.items()}
    return {"--use-precision-aware-optimizer": True, **keys}


def _precision(setup: Setup) -> Flags:
    """Return the dtypes. Main gradients are fp32 with --bf16, and fp16 with --fp16. Both formats of fp8 are as large."""
    half = setup.precision.split("-")[0]
    return {
        "--bf16": half == "bf16" or None,
        "--grad-reduce-in-bf16": (half == "bf16" and setup.grad_dtype == "bf16") or None,
        "--fp16": half == "fp16" or None,
        "--accumulate-allreduce-grads-in-fp32": (half == "fp16" and setup.grad_dtype == "fp32") or None,
        "--fp8-format": None if setup.fp8_recipe is None else "hybrid",
        "--fp8-recipe": setup.fp8_recipe,
        "--fp8-param-gather": setup.fp8_param_gather or None,
    }


def _recomputation(setup: Setup) -> Flags:
    """Return the recomputation: of modules, of every layer by itself, or of some layers of a chunk."""
    if setup.recompute == "none":
        return {}
    modules = None if setup.recompute_modules is None else setup.recompute_modules.replace(",", " ")
    keys: Flags = {"--recompute-granularity": setup.recompute, "--recompute-modules": modules}
    if setup.recompute == "full":
        some = setup.recompute_layers
        keys |= {"--recompute-method": "uniform" if some is None else "block", "--recompute-num-layers": some or 1}
    return keys


def _offloading(setup: Setup) -> Flags:
    """Return the modules whose saved tensors are moved to the host."""
    if setup.offload_modules is None:
        return {}
    return {
        "--fine-grained-activation-offloading": True,
        "--offload-modules": setup.offload_modules.replace(",", " "),
    }


def _user_buffers(setup: Setup, *, is_routed: bool) -> bool:
    """Return whether Transformer Engine has the workspaces of products that overlap with tensor parallelism's communication,
    beside one for all products and those of grouped ones."""
    overlaps = setup.sequence_parallel and setup.attention != "eager"
    return overlaps and setup.te_workspaces in ((4, 8) if is_routed else (4,))


def _kernels(setup: Setup, *, is_routed: bool) -> Flags:
    implementation = {"fused": "te", "vocab-parallel-fused": "native"}.get(setup.cross_entropy or "")
    one_by_one = {"--moe-grouped-gemm": None} if setup.te_workspaces in (1, 4) else {}
    return {
        **one_by_one,
        "--tp-comm-overlap": _user_buffers(setup, is_routed=is_routed) or None,
        "--transformer-impl": "local" if setup.attention == "eager" else None,
        "--attention-backend": _BACKENDS.get(setup.attention or ""),
        "--cross-entropy-loss-fusion": implementation is not None or None,
        "--cross-entropy-fusion-impl": implementation,
        "--no-gradient-accumulation-fusion": setup.gradient_accumulation_fusion is False or None,
    }


# --- what is written


def _unsaid(setup: Setup, model: Model, *, is_routed: bool) -> dict[str, str]:
    said = {*_SAID, "etp"} if is_routed else {*_SAID}
    if setup.optimizer == "muon":
        said.add("optimizer")
    one_by_one = is_routed and setup.te_workspaces == 1 and setup.attention != "eager"
    if one_by_one or _user_buffers(setup, is_routed=is_routed):
        said.add("te_workspaces")
    stages = setup.pp * setup.virtual_stages
    ends = setup.first_stage_layers, setup.last_stage_layers
    counts = layers_of_chunks(model.layers, stages, *ends, setup.stage_layers)
    if setup.recompute_layers is not None and setup.recompute_layers < max(counts):
        said.add("recompute_layers")
    return unsaid(setup, model, said, {}, _WHY)


def _text(flags: Flags) -> str:
    """Return the options with their values, quoted as a shell needs it."""
    lines = [
        flag if value is True else f"{flag} {shlex.quote(str(value))}"
        for flag, value in flags.items()
        if value is not None
    ]
    return "".join(f"{line}\n" for line in lines)
