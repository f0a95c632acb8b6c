"""Refusals of adapters of fused experts, where what is around them is not modelled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_ENGINES: Final = ("none", "ddp", "deepspeed")
_WITHOUT: Final = {
    "tp": 1, "pp": 1, "cp": 1, "ep": 1, "kernels": "hf", "offload_activations": "none", "reentrant_checkpoints": False,
}  # fmt: skip


def check_fused_experts(options: Options, engine: str, model: Model | None) -> None:
    """Raise InputError for engines, axes, tasks and kernels with which adapters of fused experts are not modelled."""
    adapters: Any = None if model is None else model.program.adapters
    if adapters is None or not adapters.parameters:
        return
    what = f"an adapter of {'fused experts' if adapters.of_experts else 'a router, which is one parameter,'}"
    others = "or --lora-targets of attention"
    if engine not in _ENGINES or (engine == "deepspeed" and options.zero == 3):
        how = f"engine {engine}" if engine not in _ENGINES else "ZeRO-3"
        refuse("lora_targets", options.lora_targets, f"{what} with {how} {NOT_YET}--engine ddp, --zero 1, 2, {others}")
    for name, off in _WITHOUT.items():
        if (given := getattr(options, name)) not in (None, off):
            refuse(name, given, f"with {what} {NOT_YET}{'off' if off is False else off}, {others}")
    if options.recompute == "op":
        refuse("recompute", "op", f"with {what} {NOT_YET}none, full, {others}")
    if options.task not in ("pretrain", "sft"):
        refuse("task", options.task, f"with {what} {NOT_YET}pretrain, sft, {others}")
