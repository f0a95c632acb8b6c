"""The meaning of several files together: the engine of one file decides what another one's precision and loss become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from memcalc.formats.found import Value
from memcalc.inputs.model import Model
from memcalc.tasks.program import takes_head

_CASTING: Final = ("deepspeed", "fsdp2")
"""The engines that hold fp32 weights beside 16-bit ones: mixed precision is theirs, not autocast's."""
_ENGINES_OF_HEAD: Final = ("none", "ddp", "deepspeed")
_AXES: Final = ("tp", "pp", "cp", "ep")


def with_precision_of_engine(given: Mapping[str, Any], said: Mapping[str, Value]) -> dict[str, Value]:
    """Return what files say, with autocast and 16-bit weights of the Trainer as the mixed precision of an engine that has
    it. Source: accelerate/accelerator.py (FSDP casts trained weights to fp32), deepspeed/runtime/engine.py."""
    out = dict(said)
    engine, precision = given.get("engine") or _of(said, "engine"), said.get("precision")
    if engine not in _CASTING:
        return out
    out.pop("base_dtype", None)  # all weights are held and gathered as the engine does it
    half = str(precision.value).split("-")[0] if precision is not None else ""
    if precision is None or half not in ("bf16", "fp16") or str(precision.value).endswith("-mixed"):
        return out
    out["precision"] = precision._replace(value=f"{half}-mixed")
    if engine == "fsdp2":  # accelerate's policy reduces gradients in the dtype that it gathers weights in
        out["grad_dtype"] = Value(half, precision.where, is_given=False)
    return out


def without_clipping_on_the_host(
    given: Mapping[str, Any], said: Mapping[str, Value]
) -> tuple[dict[str, Value], list[str]]:
    """Return what files say and notes: ZeRO-3 with the optimizer on the host is not modelled with clipping, which adds single
    numbers alone."""
    options = {**{name: value.value for name, value in said.items()}, **given}
    clips = said.get("clip_grad_norm")
    moved = options.get("zero") == 3 and options.get("offload_optimizer", "none") != "none"
    if not moved or clips is None or not clips.value or "clip_grad_norm" in given:
        return dict(said), []
    out = {name: value for name, value in said.items() if name != "clip_grad_norm"}
    return out, [
        f"{clips.where}: clipping is not modelled with ZeRO-3 and the optimizer on the host; it adds single numbers"
    ]


def with_loss_of_engine(
    model: Any, given: Mapping[str, Any], said: Mapping[str, Value]
) -> tuple[dict[str, Value], list[str]]:
    """Return what files say and notes: TRL's head, which a file's keys only suggest, gives way to the model's own loss where
    it is not modelled."""
    task = said.get("task")
    if "task" in given or task is None or task.is_given or task.value != "sft":
        return dict(said), []
    why = _why_no_head(model, {**{name: value.value for name, value in said.items()}, **given})
    if not why:
        return dict(said), []
    out = {name: value for name, value in said.items() if name != "task"}
    return out, [
        f"{task.where}: SFTTrainer's own head is not modelled {why}; the model's loss is counted, which keeps all logits"
    ]


def _why_no_head(model: Any, options: Mapping[str, Any]) -> str:
    """Return why TRL's head is not modelled beside other options; '' if it is."""
    engine = options.get("engine")
    if options.get("zero") == 3 or engine not in (None, *_ENGINES_OF_HEAD):
        return "with ZeRO-3" if engine in (None, "deepspeed") else f"with engine {engine}"
    for axis in _AXES:
        if (options.get(axis) or 1) > 1:
            return f"with --{axis}"
    if options.get("liger") is not None or options.get("kernels") not in (None, "hf"):
        return "with Liger's kernels"
    if isinstance(model, Model) and not takes_head(model.whole.program):
        return f"for a {model.model_type}"
    return ""


def _of(said: Mapping[str, Value], name: str) -> Any:
    return said[name].value if name in said else None
