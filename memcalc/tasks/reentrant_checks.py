"""Checks of checkpoints that re-enter autograd (`use_reentrant`): what they are compared with torch's own for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import NOT_YET, Options, option_name, refuse
from memcalc.registry import EVERY_OPTIMIZER

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_NAME: Final = "reentrant_checkpoints"
_ENGINES: Final = ("none", "ddp", "fsdp2", "deepspeed")
_AXES: Final = ("tp", "pp", "cp", "ep")
_OFF: Final = "off"
_WITHOUT: Final = {
    "offload_activations": ("none",),
    "kernels": (None, "hf"),
    "packing": (False,),
    "quantize": ("none", "nf4", "fp4"),
    "optimizer": tuple(name for name in EVERY_OPTIMIZER if name not in ("lomo", "adalomo")),
}
"""Options, with the values that reentrant checkpoints are modelled with."""


def check_reentrant(options: Options, engine: str, model: Model | None) -> None:
    """Raise InputError for reentrant checkpoints with an engine, an axis or a model that they are not modelled with."""
    if options.recompute != "full":
        why = "needs --recompute full, whose layers it says how to recompute"
        refuse(_NAME, True, f"{why}; allowed: leave it out")
    if model is None:
        refuse(_NAME, True, "a number of parameters has no layers; allowed: leave it out, or --model")
    if engine == "megatron":
        refuse(_NAME, True, f"Megatron recomputes layers by code of its own; allowed: {_OFF}")
    if engine not in _ENGINES:
        refuse(_NAME, True, f"with engine {engine} {NOT_YET}{_OFF}, or --engine {', '.join(_ENGINES)}")
    for axis in _AXES:
        if getattr(options, axis) > 1:
            refuse(_NAME, True, f"with --{axis} {getattr(options, axis)} {NOT_YET}{_OFF}")
    if model.program.source:
        refuse(_NAME, True, f"for a {model.model_type}, which is traced, {NOT_YET}{_OFF}")
    if model.model_type in _NOT_MODELLED:
        refuse(_NAME, True, f"for a {model.model_type}: {_NOT_MODELLED[model.model_type]}; allowed: {_OFF}")
    for name, modelled in _WITHOUT.items():
        value = getattr(options, name)
        if value not in modelled:
            shown = f"{option_name(name)} {'on' if value is True else value}"
            refuse(_NAME, True, f"with {shown} {NOT_YET}{_OFF}")
    shares = engine == "fsdp2" or (engine == "deepspeed" and options.zero == 3)
    if options.quantize != "none" and shares:
        refuse(_NAME, True, f"with --quantize {options.quantize} shared out by {engine} {NOT_YET}{_OFF}")


_NOT_MODELLED: Final = {
    "deberta-v2": "its layers are given the relative embeddings by keyword, and torch fails where these have a graph",
    "recurrent_gemma": "its layers keep their states, which is not modelled",
    "zamba2": "its layers have a checkpoint in a checkpoint, whose graph reaches into the outer one: not modelled",
}
