"""Checks of recomputation: which code can recompute what, and which layers a number can mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model


def check_recompute(options: Options, model: Model, *, megatron: bool) -> None:
    """Raise InputError for a kind of recomputation that does not go with the model's code. Megatron's code recomputes
    core attention, torch's dispatcher recomputes single ops of transformers' code."""
    kinds = ("none", "selective", "full") if megatron else ("none", "op", "full")
    if options.recompute not in kinds:
        why = (
            "recomputes core attention alone, which Megatron does"
            if options.recompute == "selective"
            else "is not what Megatron does"
        )
        refuse("recompute", options.recompute, f"{why}; allowed: {', '.join(kinds)}")
    if options.recompute != "none" and model.model_type == "layers":
        refuse("recompute", options.recompute, f"for --layers {NOT_YET}none")
    if options.recompute != "none" and not model.program.recomputes:
        refuse("recompute", options.recompute, f"transformers does not offer it for {model.model_type}; allowed: none")
    if options.recompute == "op" and options.kernels == "fused":
        refuse("recompute", "op", f"with kernels fused {NOT_YET}none, full")


def check_gathers(options: Options, model: Model) -> None:
    """Raise InputError for a recomputation that torch refuses under DeepSpeed's ZeRO-3 at any size. Refusals at some
    sizes are found when the step is run."""
    if options.recompute == "op" and model.support.uses_weights_within:
        why = (
            f"with ZeRO-3 a {model.model_type} gathers other weights in recomputation than in forward, and torch fails"
        )
        refuse("recompute", "op", f"{why}; allowed: none, full")


def check_recompute_layers(options: Options, engine: str, model: Model | None, *, gpt_model: bool) -> None:
    """Raise InputError for a number of recomputed layers that does not go with the engine or the model. Megatron has
    checks of its own; each of transformers' layers has a switch (`gradient_checkpointing`)."""
    layers = options.recompute_layers
    if options.recompute != "full":
        refuse("recompute_layers", layers, "needs --recompute full; allowed: leave it out")
    if engine == "megatron" or model is None:
        return
    if options.pp > 1 or gpt_model:
        axis = "pp" if options.pp > 1 else "tp"
        why = f"with engine {engine} and {axis} above 1"
        refuse("recompute_layers", layers, f"{why} {NOT_YET}leave it out, or --engine megatron")
    name = model.name or f"this {model.model_type}"
    if model.program.source:
        refuse("recompute_layers", layers, f"for a {model.model_type}, which is traced, {NOT_YET}leave it out")
    if model.support.layers_keep_states:
        why = f"for a {model.model_type}, whose layers keep their states,"
        refuse("recompute_layers", layers, f"{why} {NOT_YET}leave it out")
    if not model.program.one_stack:
        why = f"{name} has more than one stack of layers, and a number does not say which layers are meant"
        refuse("recompute_layers", layers, f"{why}; allowed: leave it out")
    if layers is not None and layers > model.layers:
        refuse("recompute_layers", layers, f"{name} has {model.layers} layers; allowed: 1 to {model.layers}")
