"""The methods of a step, resolved from options: precision and gradients' dtype, the optimizer's implementation,
attention, kernels, loss. A method that does not go with the engine or the model is an InputError of one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.kernels import DEFAULT_LOSS, losses, refusal
from memcalc.optimizers import load_optimizer
from memcalc.setup.refusals import check_fused_softmax, runs_gpt_model
from memcalc.setup.tuning_checks import check_loss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.inputs.model import Model


def precision_of(options: Options, engine: str, model: Model | None) -> str:
    """Return the precision of weights and states. Raises InputError if the engine does not have it."""
    precision = options.precision
    if engine == "megatron" and precision not in ("fp32", "bf16-mixed", "fp16-mixed"):
        refuse("precision", precision, f"with engine megatron {NOT_YET}fp32, bf16-mixed, fp16-mixed")
    if model is None:
        return precision
    allowed = "fp32, bf16-mixed, fp16-mixed"
    if engine != "deepspeed":
        allowed = "fp32, bf16, fp16, bf16-mixed, fp16-mixed, bf16-autocast, fp16-autocast"
    if precision == "fp8-mixed":
        refuse("precision", precision, f"{NOT_YET}{allowed} (all of them with --params)")
    if engine == "deepspeed" and precision.endswith("-autocast"):
        refuse("precision", precision, f"deepspeed's own torch_autocast {NOT_YET}{allowed}")
    if engine == "deepspeed" and precision in ("bf16", "fp16"):
        refuse("precision", precision, f"deepspeed keeps fp32 master weights; allowed: {allowed}")
    return precision


def grad_dtype_of(options: Options, precision: str, engine: str, model: Model | None) -> str:
    """Return the dtype that gradients are kept or reduced in."""
    natural = (
        "fp32"
        if precision.endswith("-autocast")
        else {"fp8": "bf16"}.get(precision.split("-")[0], precision.split("-")[0])
    )
    if engine in ("fsdp2", "fsdp1") and precision.endswith("-mixed"):
        allowed = ("fp32", natural)  # gradients are reduced in it; the optimizer sees fp32
        if options.grad_dtype not in (None, *allowed):
            refuse(
                "grad_dtype",
                options.grad_dtype,
                f"is not what {engine} reduces gradients in; allowed: {', '.join(allowed)}",
            )
        return options.grad_dtype or "fp32"
    if engine == "deepspeed" and options.pp > 1:
        kept = (
            "fp32" if options.zero else "bf16"
        )  # data_types: {grad_accum_dtype: fp32} of Megatron-DeepSpeed's scripts
        if options.grad_dtype not in (None, kept):
            refuse(
                "grad_dtype",
                options.grad_dtype,
                f"with engine deepspeed, pp {options.pp} and zero {options.zero} {NOT_YET}{kept}",
            )
        return kept
    if engine == "megatron":
        if options.grad_dtype not in (
            None,
            "fp32",
            natural,
        ):  # --grad-reduce-in-bf16, --accumulate-allreduce-grads-in-fp32
            allowed = ", ".join(dict.fromkeys(("fp32", natural)))
            refuse(
                "grad_dtype",
                options.grad_dtype,
                f"Megatron does not keep main gradients in it under {precision}; allowed: {allowed}",
            )
        return options.grad_dtype or ("fp32" if natural == "bf16" else natural)
    given = options.grad_dtype
    if given is None or given == natural:
        return natural
    if model is not None:
        refuse(
            "grad_dtype", given, f"engine {engine} keeps gradients in {natural}; allowed: {natural} (any with --params)"
        )
    return given


def implementation_of(options: Options, engine: str) -> str:
    """Return the optimizer's implementation in torch: the given one, or the engine's default."""
    allowed = load_optimizer(options.optimizer).implementations
    given = options.optimizer_implementation
    if given is None:
        return "fused" if engine in ("deepspeed", "megatron") and "fused" in allowed else allowed[0]
    if given not in allowed:
        refuse(
            "optimizer_implementation",
            given,
            f"{options.optimizer} has no such implementation; allowed: {', '.join(allowed)}",
        )
    return given


def attention_of(options: Options, engine: str, model: Model) -> str:
    """Return the attention that runs. Megatron's depends on the GPU."""
    kinds = ("sdpa", "eager", "flash", "unfused") if engine == "megatron" else model.program.attention_kinds
    if options.packing:
        return options.attention or "flash"  # memcalc.tasks.packing_checks
    if engine == "colossalai":
        if options.attention not in (None, "eager"):
            refuse(
                "attention", options.attention, f"titans' GPT stores all scores; with engine colossalai {NOT_YET}eager"
            )
        return "eager"
    if runs_gpt_model(options, engine):
        if options.attention in ("sdpa", "unfused"):
            why = "Megatron-DeepSpeed's GPTModel uses the flash-attn package; allowed: flash, eager"
            refuse("attention", options.attention, why)
        return options.attention or "flash"
    if engine == "megatron" and model.program.caches_latents and "sdpa" not in model.program.attention_kinds:
        why = f"Megatron's kernels are not modelled for the heads of {model.name}"
        refuse("engine", "megatron", f"{why}; allowed: none, ddp, fsdp2, deepspeed")
    if engine == "megatron" and options.precision == "fp32":
        if options.attention not in (None, "unfused"):
            refuse(
                "attention",
                options.attention,
                "needs 16-bit inputs with engine megatron, and precision is fp32; allowed: unfused",
            )
        return "unfused"
    if engine == "megatron" and options.attention not in ("eager", "unfused") and _capability(options).startswith("7."):
        why = "is too old for Transformer Engine's fused attention"
        refuse("gpu", options.gpu, f"{why}; allowed: Ampere or newer, or --attention eager, unfused")
    if options.attention is None:
        return "flash" if engine == "megatron" and _takes_flash(options, model) else kinds[0]
    if options.attention == "flash" and engine != "megatron":
        from memcalc.kernels.flash_checks import check_flash

        check_flash(options, engine, precision_of(options, engine, model), model)
        return "flash"
    if options.attention not in kinds:
        why = (
            "is a kernel of Transformer Engine (--engine megatron); allowed: "
            if options.attention == "unfused"
            else f"for heads of this width {NOT_YET}"
            if model.program.caches_latents
            else f"transformers does not offer it for {model.model_type}; allowed: "
        )
        refuse("attention", options.attention, why + ", ".join(kinds))
    return options.attention


def _capability(options: Options) -> str:
    """Return the compute capability of the named GPU; '' without one."""
    if options.gpu is None:
        return ""
    from memcalc.inputs.gpu import load_gpu

    return load_gpu(options.gpu).compute_capability


def _takes_flash(options: Options, model: Model) -> bool:
    """Tell whether Transformer Engine takes the flash-attn package, as it prefers to on GPUs before Hopper
    (get_attention_backend, at its end)."""
    from memcalc.families.base.architecture import architecture_of
    from memcalc.megatron.checks import unfit_for_flash

    capability = _capability(options)
    if options.cp > 1 or not capability.startswith("8."):
        return False
    a = architecture_of(model.model_type, model.program.config)
    return unfit_for_flash(a) is None and (a.head_dim <= 192 or capability == "8.0")


def kernels_of(options: Options, precision: str, engine: str, model: Model | None, seq_len: int | None) -> str:
    """Return the kernels that run. Megatron's softmax is fused for some sequence lengths only."""
    gpt_model = engine == "megatron" or runs_gpt_model(options, engine)
    kernels = options.kernels or ("megatron" if gpt_model else "hf")
    if engine == "megatron" and kernels != "megatron":
        refuse("kernels", kernels, "engine megatron has its own kernels; allowed: megatron")
    if model is None:
        return kernels
    program = model.program
    why = None if gpt_model else refusal(kernels, model.model_type, program.config, options.liger)
    if why is not None:
        given = "kernels" if options.liger is None else "liger"
        refuse(given, getattr(options, given) or kernels, why)
    if kernels != "hf" and precision.endswith("-autocast"):
        refuse("kernels", kernels, f"under autocast (precision {precision}) {NOT_YET}hf")
    if kernels == "megatron":
        if options.padded:
            refuse("kernels", kernels, f"with a padding mask {NOT_YET}hf, fused")
        if precision == "fp32" and engine != "megatron":
            refuse("kernels", kernels, "its attention kernels need 16-bit inputs, and precision is fp32; allowed: hf")
        if options.attention == "eager":
            other = "flash" if runs_gpt_model(options, engine) else "sdpa"
            check_fused_softmax(options, seq_len or 1, program, other)
    return kernels


def with_kernels_of_liger(options: Options) -> Options:
    """Return the options with `--kernels fused`, which `--liger` means, unless other kernels are given."""
    if options.liger is None or options.kernels == "fused":
        return options
    if options.kernels is not None:
        refuse(
            "liger", options.liger, f"with kernels {options.kernels} none of them runs; allowed: with --kernels fused"
        )
    return options._replace(kernels="fused")


def liger_of(options: Options, kernels: str, model: Model | None) -> str | None:
    """Return the parts of Liger-Kernel that are on in layers, with commas; None with other kernels."""
    if kernels != "fused":
        return None
    if model is None:
        if options.liger is not None:
            refuse("liger", options.liger, "a number of parameters has no layers; allowed: with --model")
        return None
    from memcalc.kernels.liger_parts import chosen_parts

    return ",".join(chosen_parts(options.liger, model.model_type))


def cross_entropy_of(options: Options, kernels: str, precision: str, engine: str, model: Model) -> str:
    """Return the loss that runs: the kernels' own unless another one is asked for."""
    if engine == "colossalai":
        if options.cross_entropy not in (None, "vocab-parallel"):
            why = "Colossal-AI's loss is over a vocabulary that ranks share; allowed: vocab-parallel"
            refuse("cross_entropy", options.cross_entropy, why)
        return "vocab-parallel"
    if options.task == "ppo":
        return "eager"  # its loss takes the logits themselves
    if model.task is not None:
        return "chunked"  # TRL's head, of all other tasks (memcalc.setup.task_checks)
    loss = (
        DEFAULT_LOSS[kernels]
        if options.cross_entropy is None
        else _given_loss(options, kernels, precision, engine, model)
    )
    check_loss(options, engine, loss, model)
    return loss


def _given_loss(options: Options, kernels: str, precision: str, engine: str, model: Model) -> str:
    """Return the loss that is asked for. Raises InputError if these kernels, this engine or this model do not have it."""
    allowed = losses(kernels, model.model_type)
    if (
        engine == "fsdp2" and options.tp > 1
    ):  # logits of DTensors are gathered, or split with the sequence between layers
        allowed = ("eager", "vocab-parallel") if options.sequence_parallel else ("eager",)
    if runs_gpt_model(options, engine):
        allowed = ("vocab-parallel",)
    if options.cross_entropy in allowed[1:] and precision.endswith("-autocast"):
        refuse("cross_entropy", options.cross_entropy, f"under autocast (precision {precision}) {NOT_YET}{allowed[0]}")
    if options.cross_entropy not in allowed:
        split = f", engine {engine} and tp {options.tp}" if options.tp > 1 else ""
        why = f"not with kernels {kernels}{split} for {model.model_type}; allowed: {', '.join(allowed)}"
        refuse("cross_entropy", options.cross_entropy, why)
    assert options.cross_entropy is not None
    return options.cross_entropy


_CP_COMM_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "megatron": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "fsdp2": ("all_gather", "p2p"),
    "deepspeed": ("a2a",),
}
"""The allowed values by engine that shares sequences, each one's default first."""


def cp_comm_type_of(options: Options, engine: str) -> str | None:
    """Return the way in which ranks of a sequence share keys and values; None if no ranks do."""
    if options.cp == 1:
        return None
    allowed = _CP_COMM_TYPES[engine]
    if options.cp_comm_type not in (None, *allowed):
        why = "torch's context_parallel does not exchange heads for tokens (Ulysses)"
        refuse("cp_comm_type", options.cp_comm_type, f"with engine {engine}: {why}; allowed: {', '.join(allowed)}")
    return options.cp_comm_type or allowed[0]


def sync_each_micro_batch_of(options: Options, engine: str) -> bool | None:
    """Tell whether DDP or FSDP2 reduces after every micro-batch; None if the caller cannot choose.

    By default they do not. accelerate's `accumulate` and `no_sync` (GradientAccumulationPlugin.sync_each_batch is off)
    with HF Trainer, and Lightning's `_block_parallel_sync_behavior`, do the same.
    """
    name, given = "sync_each_micro_batch", options.sync_each_micro_batch
    if engine in ("ddp", "fsdp2", "fsdp1") and options.pp == 1:
        return bool(given)
    if given is not None and options.pp > 1 and engine == "fsdp2":
        why = f"torch's pipeline schedules (pp {options.pp}) decide that: they reduce with the last micro-batch"
        refuse(name, given, f"{why}; allowed: leave it out, or --pp 1")
    if given is not None:
        why = "plain PyTorch reduces nothing" if engine == "none" else f"{engine} has its own rule"
        refuse(name, given, f"is an option of DDP and FSDP2 ({why}); allowed: with --engine ddp or fsdp2")
    return None
