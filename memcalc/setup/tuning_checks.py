"""Refusals of models of which a part trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_AXES = ("tp", "pp", "cp", "ep")


def check_tuning(options: Options, engine: str, model: Model | None) -> None:
    """Raise InputError for engines and axes that frozen weights are not modelled for."""
    if options.freeze is None:
        return
    if engine == "megatron":
        refuse("freeze", options.freeze, f"with engine megatron {NOT_YET}with --engine none, ddp, deepspeed, fsdp2")
    for name, only in (("kernels", "hf"), ("cross_entropy", "eager")):
        if getattr(options, name) not in (None, only):
            refuse(name, getattr(options, name), f"with --freeze {NOT_YET}{only}")
    for axis in _AXES:
        if getattr(options, axis) > 1:
            refuse("freeze", options.freeze, f"with --{axis} {getattr(options, axis)} {NOT_YET}with --{axis} 1")
    if engine == "deepspeed" and options.zero == 3 and model is not None and model.program.source:
        why = f"with ZeRO-3, whose linear function saves inputs of its own, for a {model.model_type}, which is traced,"
        refuse("freeze", options.freeze, f"{why} {NOT_YET}with --zero 0, 1, 2")


def input_require_grads_of(options: Options, engine: str, model: Model | None) -> bool:
    """Return whether the output of the embeddings wants a gradient. transformers' switch of checkpointing turns that on
    for models of tokens (activation_checkpointing_enable in modeling_utils.py). It changes nothing if all weights
    train."""
    given = options.input_require_grads
    if given is None:
        if options.freeze is None:
            return False
        checkpoints = options.recompute in ("full", "op") and engine != "megatron"
        return checkpoints and model is not None and model.support.batch == "tokens"
    if given and (engine == "megatron" or model is None or model.support.batch != "tokens"):
        refuse("input_require_grads", given, "is a method of transformers' models of tokens; allowed: off")
    return given
