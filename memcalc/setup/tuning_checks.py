"""Refusals of models of which a part trains or is not reached, and the defaults of adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.quantized.chosen import base_dtype_name
from memcalc.tuning.chosen import tuning_of

if TYPE_CHECKING:
    from memcalc.families.base.program import Program
    from memcalc.inputs.model import Model

_OF_ADAPTERS: Final = ("lora_targets", "lora_dropout", "lora_bias", "adapter_dtype", "modules_to_save")

_ALONE: Final = "is an option of adapters; allowed: with --lora-rank 1 or more"
_UNCHECKED: Final = (
    ("kernels", "megatron", "hf, fused"),
    ("cross_entropy", "vocab-parallel", "eager, fused, chunked, flash, liger"),
)


_OF_TWO_DTYPES: Final = ("adam", "adamw", "adamw-8bit", "paged-adamw", "paged-adamw-8bit")
"""The optimizers whose steps over fp32 adapters and 16-bit modules together are compared with the real ones."""


def check_tuning(options: Options, engine: str, precision: str, model: Model | None) -> None:
    """Raise InputError for engines and axes that frozen weights are not modelled for, and for adapters that nobody
    makes."""
    for name in _OF_ADAPTERS:
        if getattr(options, name) is not None and not options.lora_rank:
            refuse(name, getattr(options, name), _ALONE)
    if options.dora and not options.lora_rank:
        refuse("dora", options.dora, _ALONE)
    if options.freeze is None and not options.lora_rank:
        return
    name, value = ("lora_rank", options.lora_rank) if options.lora_rank else ("freeze", options.freeze)
    if options.lora_rank and options.freeze is not None:
        refuse("freeze", options.freeze, "adapters freeze all of the base; allowed: leave it out, or --lora-rank 0")
    if engine == "megatron":
        from memcalc.setup.megatron_tuning_checks import (
            check_tuning_of_megatron,  # the only engine with GPTModel's weights
        )

        check_tuning_of_megatron(options, model)
        return
    for other, unchecked, allowed in _UNCHECKED:
        if getattr(options, other) == unchecked and not options.sequence_parallel:
            refuse(other, unchecked, f"with --{name.replace('_', '-')} {NOT_YET}{allowed}")
    if max(options.tp, options.pp, options.ep) > 1:
        from memcalc.setup.split_tuning_checks import check_split  # most setups share no layers, experts or stages

        check_split(options, engine, model, name, value)
    if engine == "deepspeed" and options.zero == 3 and model is not None and model.program.source:
        why = f"with ZeRO-3, whose linear function saves inputs of its own, for a {model.model_type}, which is traced,"
        refuse(name, value, f"{why} {NOT_YET}with --zero 0, 1, 2")
    if engine == "deepspeed" and options.zero == 3 and _adapts_mlp(model):
        why = "with adapters in the MLP and ZeRO-3"
        for other, only in (("kernels", "hf"), ("cross_entropy", "eager, flash, liger")):
            if getattr(options, other) not in (None, *only.split(", ")):
                rest = "--zero 0, 1, 2, or --lora-targets of attention"
                refuse(other, getattr(options, other), f"{why} {NOT_YET}{only}, {rest}")
    if options.lora_rank:
        from memcalc.setup.fused_expert_checks import check_fused_experts  # full training has no adapters

        check_fused_experts(options, engine, model)
        _check_dtype(options, engine, precision)
    if options.base_dtype is not None and options.dora:
        refuse("base_dtype", options.base_dtype, f"with --dora {NOT_YET}leave it out")


def _adapts_mlp(model: Model | None) -> bool:
    adapters: Any = None if model is None else model.program.adapters
    return adapters is not None and any(".mlp." in path for path, _ in adapters.calls)


def check_loss(options: Options, engine: str, loss: str, model: Model) -> None:
    """Raise InputError for a loss that takes the head's weight, where that would train something else than was asked
    for."""
    program = model.program
    if loss in ("eager", "flash", "liger", "vocab-parallel"):
        return
    if program.adapters is not None and program.adapters.has(program.head_name, None):
        why = f"takes the weight of {program.head_name}, and its adapter would not train"
        refuse("cross_entropy", loss, f"{why}; allowed: eager, flash, liger, or other --lora-targets")
    asks = input_require_grads_of(options, engine, model)
    if program.held and not asks and _trains_head_alone(program):
        if loss == "fused":
            why = "gives the head no gradient if nothing before it trains (ops/fused_linear_cross_entropy.py)"
            refuse("cross_entropy", loss, f"{why}; allowed: eager, flash, liger")
        refuse("cross_entropy", loss, f"with only the head trained {NOT_YET}eager, flash, liger")


def _trains_head_alone(program: Program) -> bool:
    head = f"{program.head_name}."
    return all(weight.name.startswith(head) for weight in program.weights() if program.wants_gradient(weight))


def _check_dtype(options: Options, engine: str, precision: str) -> None:
    """Raise InputError for adapters of a dtype that peft does not make: they are fp32, or of the base's dtype."""
    base = base_dtype_name(options)
    if engine == "fsdp2" and precision.endswith("-mixed"):
        base = "fp32"  # shards of fp32, gathered in 16 bits
    given = options.adapter_dtype or "fp32"
    if engine == "fsdp2" and precision == f"{given}-mixed" and options.quantize != "none":
        why = f"with engine fsdp2 and --precision {precision} what trains is fp32"
        refuse("adapter_dtype", given, f"{why}; allowed: fp32, or --precision {given}")
    if given not in ("fp32", base):
        refuse("adapter_dtype", given, f"peft makes adapters in fp32 or in the base's dtype; allowed: {_either(base)}")
    if engine == "fsdp2" and given != base:
        why = f"with engine fsdp2, whose units have one dtype, over a base of {base},"
        refuse("adapter_dtype", given, f"{why} {NOT_YET}{base}, or --precision bf16-mixed")
    if given != base:
        _check_two_dtypes(options, engine, precision, base)


def _check_two_dtypes(options: Options, engine: str, precision: str, base: str) -> None:
    """Raise InputError for weights of the base's dtype that train beside fp32 adapters, where that is not modelled."""
    biases = options.lora_bias not in (None, "none")
    if not biases and options.modules_to_save is None:
        return
    name = f"--lora-bias {options.lora_bias}" if biases else f"--modules-to-save {options.modules_to_save}"
    beside = f"beside trained {'biases' if biases else 'modules'} of {base}"
    if engine == "ddp" and (precision.endswith("-mixed") or options.comm_hook is not None):
        how = f"precision {precision}" if options.comm_hook is None else f"--comm-hook {options.comm_hook}"
        refuse("adapter_dtype", "fp32", f"{beside} with engine ddp and {how} {NOT_YET}{base}")
    if engine == "deepspeed" or precision.endswith("-mixed"):
        return
    if options.optimizer not in _OF_TWO_DTYPES:
        how = f"--optimizer {options.optimizer}"
        refuse("adapter_dtype", "fp32", f"{beside} ({name}) with {how} {NOT_YET}{base}")


def _either(base: str) -> str:
    return "fp32" if base == "fp32" else f"fp32, {base}"


def check_ddp(model: Model | None) -> None:
    """Refuse weights that get no gradient: DDP's bucket waits for them forever, with `find_unused_parameters` off
    (torch/nn/parallel/distributed.py)."""
    if model is not None and _has_unreached(model):
        why = f"DDP fails in its second step if some weights get no gradient, as in this {model.model_type}"
        refuse("engine", "ddp", f"{why} (find_unused_parameters is off); allowed: deepspeed")


def _has_unreached(model: Model) -> bool:
    """Tell whether some weights require a gradient and get none."""
    program = model.program
    return bool(program.untrained) and any(
        program.wants_gradient(w) and not program.gets_gradient(w) for w in program.weights()
    )


def adapter_options(options: Options) -> dict[str, Any]:
    """Return the options of adapters as they are resolved."""
    lora = tuning_of(options).lora
    if lora is None:
        return {"lora_rank": 0, **dict.fromkeys(_OF_ADAPTERS), "dora": False}
    return {
        "lora_rank": lora.rank,
        "lora_targets": lora.targets,
        "lora_dropout": lora.dropout,
        "lora_bias": lora.bias,
        "adapter_dtype": base_dtype_name(options) if lora.dtype == "base" else lora.dtype,
        "dora": lora.dora,
        "modules_to_save": lora.saved,
    }


def input_require_grads_of(options: Options, engine: str, model: Model | None) -> bool:
    """Return whether the output of the embeddings requires a gradient. transformers' switch of checkpointing turns that on
    for models of tokens (activation_checkpointing_enable in modeling_utils.py). It changes nothing if all weights
    train."""
    given = options.input_require_grads
    if given is None:
        if options.freeze is None and not options.lora_rank:
            return False
        checkpoints = options.recompute in ("full", "op") and engine != "megatron"
        return checkpoints and model is not None and model.support.batch == "tokens"
    if given and (engine == "megatron" or model is None or model.support.batch != "tokens"):
        refuse("input_require_grads", given, "is a method of transformers' models of tokens; allowed: off")
    return given
