"""Refusals of models with routers: steps in which transformers' `forward` with labels, which adds the routers' loss,
does not run, and engines that fail on shared experts of no width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.inputs.model import Model

_ANOTHER_LOSS: Final[Mapping[str, str]] = {
    "pp": "the last stage's loss is of its output alone",
    "cp": "the loss is made outside of the model, whose forward gets no labels",
}
"""The reason why the routers' loss is not a part of what is trained, although the model may compute it, by option."""


def check_routed(options: Options, engine: str, model: Model) -> None:
    """Raise InputError for a model whose `output_router_logits` or whose weights without elements the engine does not
    take."""
    _check_router_outputs(options, engine, model)
    _check_empty_weights(options, engine, model)


def _check_empty_weights(options: Options, engine: str, model: Model) -> None:
    """Raise InputError for weights without elements. torch._chunk_cat, with which FSDP2 reduces gradients, fails
    ("expects non-empty tensor"). ZeRO-3's fetch_sub_module gathers nothing for a module of no elements and asserts that
    it is there."""
    empty = model.empty_weight
    if empty is None:
        return
    name = model.name or model.model_type
    if engine == "fsdp2":
        why = f"torch's FSDP2 fails over weights of no elements, as {empty} of {name}"
        refuse("engine", engine, f"{why}; allowed: none, ddp, deepspeed with --zero 0 to 2")
    if engine == "deepspeed" and options.zero == 3:
        why = f"DeepSpeed's ZeRO-3 fails over weights of no elements, as {empty} of {name}"
        refuse("zero", options.zero, f"{why}; allowed: 0, 1, 2")


def _check_router_outputs(options: Options, engine: str, model: Model) -> None:
    if not getattr(model.program.config, "output_router_logits", False):
        return
    asked = f"output_router_logits of {model.name or model.model_type}"
    for name, why in _ANOTHER_LOSS.items():
        if getattr(options, name) > 1:
            refuse(name, getattr(options, name), f"with {asked}: {why}, which {NOT_YET}1, or a config with it as false")
    if engine == "megatron" or (engine == "deepspeed" and options.tp > 1):
        allowed = "--engine fsdp2, or a config with it as false"
        refuse("engine", engine, f"has an auxiliary loss of its own, and {asked} {NOT_YET}{allowed}")
    if engine == "deepspeed" and options.ep > 1:
        why = f"AutoEP has layers of its own, in which {asked}"
        refuse("ep", options.ep, f"{why} {NOT_YET}1, --engine fsdp2, or a config with it as false")
