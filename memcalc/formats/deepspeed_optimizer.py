"""The optimizer section of DeepSpeed's JSON.

Source: deepspeed/runtime/engine.py, _configure_basic_optimizer (0.19.8).
"""

from __future__ import annotations

from memcalc.formats.deepspeed_names import OPTIMIZERS
from memcalc.formats.found import Value
from memcalc.formats.section import Section


def read_optimizer(top: Section, *, offloads: bool) -> dict[str, Value]:
    """Return the optimizer. Without this section it is the client's. On the host it has no implementation of torch's."""
    if "optimizer" not in top:
        top.ignore("optimizer")
        return {}
    section = top.section("optimizer")
    kind = section.text("type")
    if kind is None:
        section.refuse("type", f"allowed: {', '.join(OPTIMIZERS)}")
    if kind.lower() not in OPTIMIZERS:
        section.refuse("type", f"is not modelled; allowed: {', '.join(OPTIMIZERS)}")
    params = section.section("params")
    optimizer = OPTIMIZERS[kind.lower()]
    if optimizer == "adamw" and params.flag("adam_w_mode") is False and kind.lower() == "adam":
        optimizer = "adam"
    if kind.lower() == "sgd" and (params.number("momentum") or 0) > 0:
        optimizer = "sgd-momentum"
    fp16 = top.section("fp16")
    if optimizer in ("lamb", "onebit-lamb") and fp16.flag("enabled") and fp16.number("loss_scale"):
        fp16.refuse("loss_scale", f"DeepSpeed refuses a static loss scale with {kind}; allowed: 0")
    out = {"optimizer": section.value("type", optimizer)}
    if params.flag("torch_adam") and not offloads:
        out["optimizer_implementation"] = _implementation_of_torch(params, params.where("torch_adam"))
    elif kind.lower() == "sgd":
        out["optimizer_implementation"] = _implementation_of_torch(params, section.where("type"))
    return out


def _implementation_of_torch(params: Section, where: str) -> Value:
    """Return the implementation of an optimizer of torch's, which `where` asks for: unless it is told otherwise, it
    updates all parameters at once on a GPU."""
    if params.flag("fused"):
        return params.value("fused", "fused")
    return params.value("foreach", "for-loop") if params.flag("foreach") is False else Value("foreach", where)
