"""Refusals of NEFTune's noise: what it is not modelled with, each by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.families import FAMILIES
from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_NAME: Final = "neftune_alpha"
_ENGINES: Final = ("none", "ddp", "deepspeed", "fsdp2")
_TASKS: Final = ("pretrain", "sft")
_AXES: Final = ("tp", "pp", "cp", "ep")
NOT_NOISY: Final = ("bart", "gpt_neo", "resnet")
"""The types with a program whose step with noise does not equal that of transformers' own hook, or that look nothing up."""


def check_neftune(options: Options, engine: str, model: Model | None) -> None:
    """Raise InputError for noise with an engine, a task or a model that it is not modelled with."""
    alpha = options.neftune_alpha
    if model is None:
        refuse(_NAME, alpha, "a number of parameters has no embeddings; allowed: leave it out, or --model")
    if model.model_type in NOT_NOISY or model.model_type not in FAMILIES or model.program.source:
        refuse(_NAME, alpha, f"for a {model.model_type} {NOT_YET}leave it out")
    if engine not in _ENGINES:
        refuse(_NAME, alpha, f"with engine {engine} {NOT_YET}with --engine {', '.join(_ENGINES)}")
    if options.task not in _TASKS:
        refuse(_NAME, alpha, f"with --task {options.task} {NOT_YET}with --task {', '.join(_TASKS)}")
    for axis in _AXES:
        if getattr(options, axis) > 1:
            refuse(_NAME, alpha, f"with --{axis} {getattr(options, axis)} {NOT_YET}with --{axis} 1")
