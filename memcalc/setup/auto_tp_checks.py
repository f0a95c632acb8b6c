"""Checks of DeepSpeed's AutoTP: what goes beside it, the model types that are compared with it, and equal parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model


def check_auto_tp(options: Options, engine: str, model: Model | None) -> None:
    """Raise InputError for a setup that AutoTP does not cut, or that is not modelled of it."""
    from memcalc.layout.auto_tp import TYPES

    if engine != "deepspeed":
        refuse("autotp", True, f"is DeepSpeed's, and the engine is {engine}; allowed: off, or --engine deepspeed")
    if options.tp == 1:
        refuse("autotp", True, "needs --tp 2 or more; allowed: off")
    split = f"with --autotp {NOT_YET}"
    for name in ("pp", "cp", "ep"):
        if getattr(options, name) > 1:
            refuse(name, getattr(options, name), f"{split}1")
    if options.zero == 3:
        refuse("zero", 3, f"{split}0, 1, 2")
    if options.precision not in ("bf16-mixed", "fp16-mixed"):
        refuse("precision", options.precision, f"{split}bf16-mixed, fp16-mixed")
    if options.optimizer not in ("adamw", "adam"):
        refuse("optimizer", options.optimizer, f"{split}adamw, adam")
    for name, allowed in (("recompute", "none"), ("kernels", "hf"), ("cross_entropy", "eager")):
        if getattr(options, name) not in (None, allowed):
            refuse(name, getattr(options, name), f"{split}{allowed}")
    for name in ("padded", "sequence_parallel", "clip_grad_norm"):
        if getattr(options, name):
            refuse(name, True, f"{split}off")
    for name in ("offload_optimizer", "offload_params"):
        if getattr(options, name) != "none":
            refuse(name, getattr(options, name), f"{split}none")
    if model is None:
        refuse("autotp", True, "a number of parameters has no linear layers to cut; allowed: off, or --model")
    if model.model_type not in TYPES:
        refuse("autotp", True, f"for a {model.model_type} {NOT_YET}off, or a model of type {', '.join(TYPES)}")
    _check_parts(options, model)


def _check_parts(options: Options, model: Model) -> None:
    name, ranks = model.name or f"this {model.model_type}", options.tp
    program = cast(Any, model.program)
    if program.config.tie_word_embeddings:
        why = f"{name} has a tied head, whose rows AutoTP shares and whose loss it replaces, which"
        refuse("autotp", True, f"{why} {NOT_YET}off, or a model with a head of its own")
    sizes = {
        "attention heads": program.heads, "key/value heads": program.kv_heads, "ffn": program.ffn, "tokens": program.vocab,
    }  # fmt: skip
    for what, dim in sizes.items():
        if dim.size % ranks:
            why = f"{name} has {dim.size} {what}, of which AutoTP's ranks get unequal parts, which"
            refuse("tp", ranks, f"{why} {NOT_YET}a divisor of {dim.size}")
