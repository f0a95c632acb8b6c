"""Refusals of what DeepSpeed or this version does not do with parts of ZeRO++."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import NOT_YET, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.inputs.options import Options

SWITCHES: Final = ("zero_quantized_weights", "zero_quantized_gradients")
SECOND: Final = "zero_hpz_partition_size"


def check_zero_plus_plus(options: Options, engine: str, precision: str, model: Model | None) -> None:
    """Raise InputError for what is not done with a part of ZeRO++ that is on."""
    on = [(name, True) for name in SWITCHES if getattr(options, name)]
    ranks = options.zero_hpz_partition_size
    for name, value in (*on, *([(SECOND, ranks)] if ranks > 1 else [])):
        _check(name, value, options, engine, model)
    if ranks > 1:
        _check_second(options, model)
    if options.zero_quantized_gradients:
        _check_gradients(options, precision)


def _check(name: str, value: object, options: Options, engine: str, model: Model | None) -> None:
    """Refuse what goes with no part of ZeRO++."""
    off = "1" if name == SECOND else "off"
    if engine != "deepspeed" or options.zero != 3:
        refuse(
            name, value, f"is an option of DeepSpeed's ZeRO++; allowed: with --engine deepspeed and --zero 3, or {off}"
        )
    if options.gpus == 1:
        refuse(name, value, f"on 1 GPU nothing is sent; allowed: --gpus 2 or more, or {off}")
    if model is None:
        refuse(name, value, f"with --params {NOT_YET}{off}, or --model")
    if model.program.source:
        refuse(name, value, f"for a {model.model_type}, which is traced, {NOT_YET}{off}")
    for other, plain in (("tp", 1), ("pp", 1), ("cp", 1), ("ep", 1)):
        if getattr(options, other) != plain:
            refuse(name, value, f"with --{other} {getattr(options, other)} {NOT_YET}{off}, or --{other} {plain}")
    for other in ("offload_optimizer", "offload_params", "quantize"):
        if getattr(options, other) != "none":
            refuse(
                name, value, f"with --{other.replace('_', '-')} {getattr(options, other)} {NOT_YET}{off}, or none there"
            )
    if options.task not in ("pretrain", "sft"):
        refuse(name, value, f"with --task {options.task} {NOT_YET}{off}, or --task sft")
    if options.recompute == "op":
        refuse(name, value, f"with --recompute op {NOT_YET}{off}, or --recompute full")


def _check_second(options: Options, model: Model | None) -> None:
    """Refuse a second partition that the ranks do not divide into, and parameters that no step gathers."""
    ranks, gpus = options.zero_hpz_partition_size, options.gpus
    if gpus % ranks:
        divisors = ", ".join(str(n) for n in range(2, gpus + 1) if gpus % n == 0)
        refuse(SECOND, ranks, f"does not divide {gpus} GPUs; allowed: 1, {divisors}")
    if model is not None and model.program.untrained:
        refuse(SECOND, ranks, f"for a {model.model_type}, some of whose weights no step gathers, {NOT_YET}1")


def _check_gradients(options: Options, precision: str) -> None:
    """Refuse gradients that the kernel cannot read, and nodes that are not full."""
    name, gpus, node = "zero_quantized_gradients", options.gpus, options.gpus_per_node
    if precision.startswith("fp32"):
        refuse(
            name,
            True,
            "DeepSpeed's kernel reads 16-bit gradients; allowed: --precision bf16-mixed or fp16-mixed, or off",
        )
    if gpus > node and gpus % node:
        why = f"DeepSpeed makes its groups of whole nodes, and {gpus} GPUs are not a multiple of {node}"
        refuse(name, True, f"{why}; allowed: --gpus or --gpus-per-node so that they are, or off")
