"""Refusal of other engines for a model that is an engine's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.inputs.options import Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model


def check_engine_of_model(options: Options, model: Model | None) -> None:
    """Raise InputError for another engine, or a task of another tool, with a model that is an engine's own."""
    only = None if model is None else model.support.only_engine
    if model is None or only is None:
        return
    why = f"a {model.model_type} is Megatron-LM's GPTModel; allowed: "
    if options.engine not in (None, only):
        refuse("engine", options.engine, f"{why}{only}")
    if options.lora_rank:
        refuse("lora_rank", options.lora_rank, f"{why}0")
    if options.task != "pretrain":
        refuse("task", options.task, f"{why}pretrain")
