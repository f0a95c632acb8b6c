"""Refusal of options for a network that a file lists layer by layer: those that change transformers' modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import NOT_YET, refuse

if TYPE_CHECKING:
    from memcalc.inputs.options import Options

_AXES: Final = ("tp", "pp", "cp", "ep")
_ENGINES: Final = ("none", "ddp", "deepspeed")


def check_layers(options: Options) -> None:
    """Raise InputError for an option that belongs to transformers' language models, or to another engine's own."""
    if options.engine not in (None, *_ENGINES):
        refuse("engine", options.engine, f"for --layers {NOT_YET}{', '.join(_ENGINES)}")
    for axis in _AXES:
        if getattr(options, axis) > 1:
            refuse(axis, getattr(options, axis), f"for --layers {NOT_YET}1")
    if options.lora_rank:
        refuse("lora_rank", options.lora_rank, f"for --layers {NOT_YET}0")
    if options.task != "pretrain":
        refuse("task", options.task, "trains language models, not those of --layers; allowed: pretrain")
    if options.quantize != "none":
        refuse("quantize", options.quantize, f"for --layers {NOT_YET}none")
    if options.precision.startswith("fp8"):
        refuse("precision", options.precision, f"for --layers {NOT_YET}fp32, bf16, fp16, bf16-mixed, bf16-autocast")
