"""Refusals of quantised bases whose weights an engine shards, and the dtype of the tensors that hold their codes."""

from __future__ import annotations

from typing import Final

from memcalc.inputs.options import NOT_YET, PLUS_PLUS, Options, refuse
from memcalc.quantized.chosen import base_dtype_name

_WHOLE: Final = "uint8"


def storage_name(options: Options, engine: str) -> str:
    """Return the dtype of the tensors that hold 4-bit codes. bitsandbytes' own is uint8, which FSDP does not shard; with FSDP
    launchers' examples set the dtype of the other weights."""
    if options.quantize_storage is not None:
        return options.quantize_storage
    return gathered_name(options) if engine == "fsdp2" or (engine == "deepspeed" and options.zero == 3) else _WHOLE


def gathered_name(options: Options) -> str:
    """Return the dtype in which FSDP2 gathers weights: that of its policy, or else the base's."""
    name, _, rest = options.precision.partition("-")
    return name if rest == "mixed" else base_dtype_name(options)


def check_sharded(options: Options, engine: str) -> None:
    """Raise InputError for codes that an engine casts, and for quantised bases whose shards are not modelled."""
    storage, base = options.quantize_storage, gathered_name(options)
    if storage not in (None, _WHOLE, base) and engine in ("deepspeed", "fsdp2"):
        refuse("quantize_storage", storage, f"{_cast(options, engine, base)}allowed: {_WHOLE}, {base}")
    if engine == "fsdp2":
        _check_fsdp2(options, base)
    elif engine == "deepspeed" and options.zero == 3:
        _check_zero_3(options, base)


def _check_fsdp2(options: Options, base: str) -> None:
    kind = options.quantize
    if kind == "int8":
        why = "bitsandbytes' Linear8bitLt looks for weight.CB, and the parameter that FSDP2 gathers has none"
        refuse("quantize", kind, f"with engine fsdp2: {why}; allowed: nf4, fp4, or --engine ddp")
    if options.offload_params != "none" and options.quantize_storage == _WHOLE:
        why = "with --offload-params, which leaves weights outside FSDP2's units where they are,"
        refuse("quantize_storage", _WHOLE, f"{why} {NOT_YET}{base}")
    if options.precision.endswith("-mixed"):
        _check_trained(options, base)
    elif options.prepare_kbit_training:
        why = f"with engine fsdp2 and --precision {options.precision}, which gathers two dtypes then,"
        refuse("prepare_kbit_training", True, f"{why} {NOT_YET}off, or --precision {base}-mixed")


def _check_zero_3(options: Options, base: str) -> None:
    kind = options.quantize
    if kind == "int8":
        why = "with ZeRO-3, beside whose shards bitsandbytes keeps the codes whole (state.CB of Linear8bitLt),"
        refuse("quantize", kind, f"{why} {NOT_YET}nf4, fp4, or --zero 0, 1, 2")
    if options.quantize_storage == _WHOLE:
        refuse("quantize_storage", _WHOLE, f"with ZeRO-3, which gathers two dtypes one by one then, {NOT_YET}{base}")
    for name in ("offload_params", "offload_optimizer"):
        if getattr(options, name) not in (None, "none"):
            refuse(name, getattr(options, name), f"with --quantize {kind} and ZeRO-3 {NOT_YET}none")
    for name, off in PLUS_PLUS.items():
        if getattr(options, name) != off:
            refuse(name, getattr(options, name), f"with --quantize {kind} {NOT_YET}{'off' if off is False else off}")


def _cast(options: Options, engine: str, base: str) -> str:
    """Return the reason why codes cannot be in another dtype than the base."""
    if engine == "deepspeed":
        return f"DeepSpeed casts every floating-point tensor to {base}, codes too; "
    if options.precision.endswith("-mixed"):
        return f"FSDP2's policy casts every floating-point tensor to {base}, codes too; "
    return f"in units with weights of {base} {NOT_YET}".removesuffix("allowed: ")


def _check_trained(options: Options, base: str) -> None:
    """Raise InputError for weights of the base's dtype that train beside fp32 adapters: FSDP2 wants one dtype of all that trains
    in a unit (_fsdp_param_group.py, _init_mp_dtypes)."""
    biases = options.lora_bias not in (None, "none")
    if not biases and options.modules_to_save is None:
        return
    name, value = ("lora_bias", options.lora_bias) if biases else ("modules_to_save", options.modules_to_save)
    why = f"over a base of {base} beside adapters of fp32 with engine fsdp2, which wants one dtype of all that trains in a unit,"
    refuse(
        name,
        value,
        f"{why} {NOT_YET}{'none' if biases else 'leave it out'}, or --precision {base} --adapter-dtype {base}",
    )
