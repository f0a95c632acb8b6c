"""Refusals of activations on the host: what TRL's OffloadActivations is not modelled with, each by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_NAME: Final = "offload_activations"
_ENGINES: Final = ("none", "ddp")
_TASKS: Final = ("pretrain", "sft")
_AXES: Final = ("tp", "pp", "cp", "ep")
MOVED: Final = (
    "arcee", "ernie4_5", "gemma", "granite", "helium", "hunyuan_v1_dense", "llama", "ministral", "mistral",
    "olmo", "olmo2", "olmo3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
"""The types whose step is compared with TRL's own class around transformers' model."""


def check_offloaded_activations(options: Options, engine: str, model: Model | None) -> None:
    """Raise InputError for activations on the host with an engine, a task or a model that they are not modelled with."""
    where = options.offload_activations
    if model is None:
        refuse(_NAME, where, "a number of parameters has no activations; allowed: none, or --model")
    if model.model_type not in MOVED:
        refuse(_NAME, where, f"for a {model.model_type} {NOT_YET}none, or one of {', '.join(MOVED)}")
    if engine not in _ENGINES:
        why = f"with engine {engine}, which gives parameters other storages than those that TRL has noted,"
        refuse(_NAME, where, f"{why} {NOT_YET}with --engine {', '.join(_ENGINES)}")
    if options.task not in _TASKS:
        refuse(_NAME, where, f"with --task {options.task} {NOT_YET}with --task {', '.join(_TASKS)}")
    for axis in _AXES:
        if getattr(options, axis) > 1:
            refuse(_NAME, where, f"with --{axis} {getattr(options, axis)} {NOT_YET}with --{axis} 1")
    if options.kernels not in (None, "hf"):
        refuse("kernels", options.kernels, f"with --offload-activations {where} {NOT_YET}hf")
    if options.task == "pretrain" and options.cross_entropy not in (None, "eager"):
        refuse("cross_entropy", options.cross_entropy, f"with --offload-activations {where} {NOT_YET}eager")
    if options.recompute not in ("none", "full"):
        refuse("recompute", options.recompute, f"with --offload-activations {where} {NOT_YET}none, full")
    if options.quantize != "none":
        refuse("quantize", options.quantize, f"with --offload-activations {where} {NOT_YET}none")
