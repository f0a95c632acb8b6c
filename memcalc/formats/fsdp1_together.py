"""FSDP version 1 of files: estimated as the engine fsdp1 where it is modelled, else as FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from memcalc.formats.found import Value
from memcalc.formats.section import Section
from memcalc.inputs.model import Model
from memcalc.optimizers import OPTIMIZERS

OPTIONS: Final = ("use_orig_params", "backward_prefetch", "forward_prefetch")
"""The options that only FSDP1 has."""
_PREFETCH: Final = {"BACKWARD_PRE": "pre", "1": "pre", "BACKWARD_POST": "post", "2": "post", "NO_PREFETCH": "none"}
_OTHERS: Final = ("lora_rank", "freeze", "task", "offload_params", "offload_optimizer")
_OFF: Final = (None, 0, "none", "pretrain")
_AXES: Final = ("tp", "pp", "cp", "ep")


def fsdp1_of(section: Section, prefix: str) -> dict[str, Value]:
    """Return the options that only FSDP1 has, by keys that begin with `prefix`.

    Without a key parameters are the original ones and nothing is gathered ahead (accelerate/commands/launch.py;
    transformers/training_args.py, _process_fsdp_args). Raises InputError for words that accelerate does not know.
    """
    out: dict[str, Value] = {}
    for name, default in (("use_orig_params", True), ("forward_prefetch", False)):
        said = section.flag(prefix + name)
        out[name] = section.default(prefix + name, default) if said is None else section.value(prefix + name, said)
    key = f"{prefix}backward_prefetch"
    value = section.raw(key)
    if value is None:
        return {**out, "backward_prefetch": section.default(key, "none")}
    word = str(value).strip().upper()
    if word not in _PREFETCH:
        section.refuse(key, "allowed: BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH")
    return {**out, "backward_prefetch": section.value(key, _PREFETCH[word])}


def with_fsdp1_where_modelled(
    model: Any, given: Mapping[str, Any], said: Mapping[str, Value]
) -> tuple[dict[str, Value], list[str]]:
    """Return what files say, with FSDP2 in the place of an FSDP1 that is not modelled beside the rest, and a note of it."""
    engine = said.get("engine")
    if "engine" in given or engine is None or engine.value != "fsdp1":
        return dict(said), []
    why = _why_not(model, {**{name: value.value for name, value in said.items()}, **given})
    if not why or any(name in given for name in OPTIONS):
        return dict(said), []
    out = {name: value for name, value in said.items() if name not in OPTIONS}
    return out | {"engine": engine._replace(value="fsdp2")}, [f"{engine.where}: FSDP1, estimated as FSDP2 {why}."]


def _why_not(model: Any, options: Mapping[str, Any]) -> str:
    """Return why FSDP1 is not modelled beside other options; '' if it is."""
    for name in _OTHERS:
        if options.get(name) not in _OFF:
            return f"with --{name.replace('_', '-')} {options[name]}"
    if options.get("gpus", 1) == 1 or options.get("shard_group") == 1:
        return "where one GPU has all shards"
    for axis in _AXES:
        if (options.get(axis) or 1) > 1:
            return f"with --{axis}"
    if str(options.get("precision")).endswith("-autocast"):
        return "under autocast"
    optimizer = str(options.get("optimizer"))
    if optimizer in OPTIMIZERS and not OPTIMIZERS[optimizer].elementwise:
        return f"with optimizer {optimizer}"
    if isinstance(model, Model):
        program = model.whole.program
        if program.source or not program.one_stack or program.layers_share or program.untrained:
            return f"for a {model.model_type}"
    return ""
