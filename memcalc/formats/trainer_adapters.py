"""Adapters and quantised bases in the files of transformers' Trainer and of the tools over it."""

from __future__ import annotations

from typing import Final, NamedTuple

from memcalc.formats.found import Value
from memcalc.formats.section import Section
from memcalc.formats.trainer_findings import Findings, modules

_STORAGE: Final = {"uint8": "uint8", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""transformers' names of dtypes that codes can be in (BitsAndBytesConfig), in memcalc's words. Codes in int8 and float64 are not
modelled."""
BY_NAME: Final = "all-linear-by-name"
"""`--lora-targets` of a tool that looks for the linear layers itself and hands their names to peft, and names behind commas that
its file adds (memcalc.formats.model_together)."""


class Adapters(NamedTuple):
    """The keys of one tool for adapters, and the tool's defaults."""

    rank: str
    targets: str
    saved: str
    dora: str
    default_rank: int | None
    default_targets: str
    default_dropout: float
    every: str = "all-linear"
    """The tool's word for all linear layers but the head."""
    every_means: str = "all-linear"
    """The word's meaning: peft's own, or `BY_NAME`."""


def read_adapters(found: Findings, keys: Adapters) -> None:
    """Set the options of LoRA. Raises InputError for a rank that is 0 or missing and has no default."""
    section = found.section
    rank = section.whole(keys.rank, least=1, most=10**6)
    if rank is None and keys.default_rank is None:
        section.refuse(keys.rank, "allowed: a whole number from 1 to 1000000")
    found.take("lora_rank", keys.rank, rank, keys.default_rank)
    targets = _targets(section, keys)
    found.take("lora_targets", keys.targets, targets, keys.default_targets)
    dropout = section.number("lora_dropout")
    if dropout is not None and not 0 <= dropout < 1:
        section.refuse("lora_dropout", "allowed: a number from 0 up, below 1")
    found.take("lora_dropout", "lora_dropout", dropout, keys.default_dropout)
    found.give("dora", keys.dora, section.flag(keys.dora))
    found.give("modules_to_save", keys.saved, modules(section, keys.saved))


def _targets(section: Section, keys: Adapters) -> str | None:
    """Return `--lora-targets`: all linear layers, or names."""
    text = modules(section, keys.targets)
    if text == keys.every:
        return keys.every_means
    return "all-linear" if text in ("all-linear", "all_linear") else text


def give_eight_bits(found: Findings, key: str, place: Section, switch: str, *, reenters: bool) -> None:
    """Set a base in 8 bits that `key` gives. `switch` in `place` says whether checkpoints re-enter; `reenters` is the tool's own
    choice."""
    found.give("quantize", key, "int8")
    given = place.flag(switch)
    recompute = found.options.get("recompute")
    if recompute is not None and recompute.value == "full" and (reenters if given is None else given):
        what = "checkpoints that re-enter free the inputs of 8-bit layers, which are counted as kept"
        found.notes.append(f"{place.where(switch)}: {what}")


def give_quantized(found: Findings, key: str, kind: str, compute_dtype: str, double: Value) -> None:
    """Set a base in 4 bits that `key` gives. `double`: whether its scales are quantised too."""
    found.give("quantize", key, kind)
    found.assume("quantize_compute_dtype", key, compute_dtype)
    found.options["double_quant"] = double


def give_storage(found: Findings, place: Section, default: str) -> None:
    """Set the dtype of the tensors that hold 4-bit codes: a key in `place`, or what the tool uses without it."""
    key = "bnb_4bit_quant_storage"
    text = place.text(key)
    if text is None:
        found.options["quantize_storage"] = place.default(key, default)
        return
    name = text.strip().lower().removeprefix("torch.")
    if name not in _STORAGE:
        place.refuse(key, "allowed: uint8, bfloat16, float16, float32")
    found.options["quantize_storage"] = place.value(key, _STORAGE[name])
