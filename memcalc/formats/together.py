"""The meaning of several files together: the engine of one file decides what another one's precision and loss become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from memcalc.formats.found import Value
from memcalc.formats.quantized_shards import keeps_base, with_base_as_loaded
from memcalc.inputs.model import Model
from memcalc.tasks.program import takes_head

_CASTING: Final = ("deepspeed", "fsdp2", "fsdp1")
"""The engines that hold fp32 weights beside 16-bit ones: mixed precision is theirs, not autocast's."""
_ENGINES_OF_HEAD: Final = ("none", "ddp", "deepspeed")
_AXES: Final = ("tp", "pp", "cp", "ep")


def with_precision_of_engine(
    given: Mapping[str, Any], said: Mapping[str, Value], of_trainer: Value | None
) -> dict[str, Value]:
    """Return what files say, with autocast and 16-bit weights of the Trainer as the mixed precision of an engine that has
    it. `of_trainer`: the precision that the Trainer's arguments say.

    Source: accelerate/accelerator.py (FSDP casts trained weights to fp32), deepspeed/runtime/engine.py.
    """
    out = dict(said)
    engine, precision = given.get("engine") or _of(said, "engine"), said.get("precision")
    if engine not in _CASTING:
        return out
    if of_trainer is not None and not keeps_base(engine, said):
        out.pop("base_dtype", None)  # all weights are held and gathered as the engine does it
    half = str(precision.value).split("-")[0] if precision is not None else ""
    if (
        precision is None
        or precision is not of_trainer
        or half not in ("bf16", "fp16")
        or str(precision.value).endswith("-mixed")
    ):
        return out
    out["precision"] = precision._replace(value=f"{half}-mixed")
    if engine in ("fsdp2", "fsdp1"):  # accelerate's policy reduces gradients in the dtype that it gathers weights in
        out["grad_dtype"] = Value(half, precision.where, is_given=False)
    return with_base_as_loaded(out, precision, half) if keeps_base(engine, said) else out


class _LeftOut(NamedTuple):
    """Options of files that are not modelled beside others, and what is estimated in their place."""

    names: tuple[str, ...]
    why: str
    """The case and the assumption, for a note. The estimate without them is too high, or lacks single numbers."""


def without_what_is_not_modelled(
    given: Mapping[str, Any], said: Mapping[str, Value]
) -> tuple[dict[str, Value], list[str]]:
    """Return what files say, without what memcalc refuses beside the rest and can leave out honestly, and a note for each."""
    out, notes = dict(said), list[str]()
    for one in _left_out({**{name: value.value for name, value in said.items()}, **given}):
        found = [name for name in one.names if name in out and name not in given]
        if found:
            notes.append(f"{out[found[0]].where}: {one.why}")
        for name in found:
            del out[name]
    return out, notes


def _left_out(options: Mapping[str, Any]) -> Iterator[_LeftOut]:
    autocasts = str(options.get("precision")).endswith("-autocast")
    if autocasts and options.get("cross_entropy") in ("chunked", "fused", "liger"):
        yield _LeftOut(
            ("cross_entropy",), "is not modelled under autocast; the model's loss is counted, which keeps all logits"
        )
    if autocasts and options.get("kernels") == "fused":
        yield _LeftOut(
            ("kernels", "liger", "cross_entropy"),
            "Liger's kernels are not modelled under autocast; transformers' are counted, which keep more",
        )
    if options.get("clip_grad_norm") and options.get("autotp"):
        yield _LeftOut(
            ("clip_grad_norm",), "clipping is not modelled with AutoTP, and left out; it adds single numbers"
        )
    if options.get("clip_grad_norm") and options.get("engine") == "fsdp2" and _has_two_meshes(options):
        yield _LeftOut(
            ("clip_grad_norm",),
            "clipping by norms of two meshes, which the tool combines by itself (accelerate: _clip_grad_norm_dtensor_aware), "
            "is not modelled, and left out; it adds single numbers",
        )


def _has_two_meshes(options: Mapping[str, Any]) -> bool:
    """Tell whether weights that FSDP2 shards are on different meshes: those that another axis splits, and the rest."""
    splits = _degree(options, "tp") > 1 and not options.get("sequence_parallel")
    return splits or _degree(options, "ep") > 1


def _degree(options: Mapping[str, Any], axis: str) -> int:
    value = options.get(axis)
    return value if isinstance(value, int) else 1


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
