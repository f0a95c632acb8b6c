"""The precision of transformers' Trainer: the dtype in which weights are loaded, and autocast over them.

Source: transformers/trainer.py; accelerate/accelerator.py (autocast in prepare_model); accelerate/utils/fsdp_utils.py
(weights that train become fp32 under mixed precision).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from memcalc.formats.section import Section
from memcalc.formats.trainer_findings import Findings
from memcalc.tasks import ONLINE

DTYPES: Final[dict[str, str]] = {
    "float32": "fp32", "fp32": "fp32", "float": "fp32",
    "bfloat16": "bf16", "bf16": "bf16",
    "float16": "fp16", "fp16": "fp16", "half": "fp16",
}  # fmt: skip
"""The names of torch's dtypes in memcalc's words."""
_AUTO: Final = "auto"


class Precision(NamedTuple):
    """The precision of a training step, and what of it is no option."""

    precision: str
    base_dtype: str | None = None
    """The dtype of a frozen base, if it is not the precision's."""
    note: str = ""
    grad_dtype: str | None = None
    """The dtype that gradients are reduced in, if it is not what memcalc takes for the precision."""


def dtype(section: Section, key: str) -> str | None:
    """Return the dtype at a key in memcalc's words, "auto" for the checkpoint's; None if it is not there."""
    text = section.text(key)
    if text is None:
        return None
    name = text.strip().lower().removeprefix("torch.")
    if name == _AUTO:
        return _AUTO
    if name not in DTYPES:
        section.refuse(key, "allowed: auto, bfloat16, float16, float32")
    return DTYPES[name]


def autocast(found: Findings, default: str | None = None) -> tuple[str | None, bool]:
    """Return the dtype of autocast that the switches bf16 and fp16 give, or None, and whether a switch gives it."""
    section = found.section
    bf16, fp16 = section.flag("bf16"), section.flag("fp16")
    if bf16 and fp16:
        section.refuse("fp16", "contradicts bf16; allowed: one of them")
    if bf16 or fp16:
        return "bf16" if bf16 else "fp16", True
    if bf16 is False or (fp16 is False and default != "bf16"):
        return None, False  # off leaves accelerate's own setting as it is
    return default, False


def combined(
    weights: str, autocast: str | None, *, adapters: bool, engine: str | None, quantized: bool = False
) -> Precision:
    """Return the precision of weights loaded in a dtype, with autocast in another or without it.

    `adapters`: they train in fp32 beside a frozen base. `engine`: fsdp2, deepspeed, or None for the Trainer's own.
    `quantized`: the base has weights in 4 bits, and the others keep their dtype until FSDP gathers them.
    """
    if engine == "deepspeed":
        return Precision(f"{autocast}-mixed" if autocast else "fp32")
    if engine == "fsdp2":  # accelerate's policy reduces gradients in the dtype that it gathers weights in
        base = weights if quantized and weights != autocast else None
        return Precision(f"{autocast}-mixed", base, grad_dtype=autocast) if autocast else Precision(weights)
    if autocast is None:
        return Precision(weights)
    if weights == "fp32":
        return Precision(f"{autocast}-autocast")
    if adapters:
        return Precision(f"{autocast}-autocast", base_dtype=weights)
    return Precision(weights, note=f"autocast over weights in {weights} is counted as {weights} without it")


def give_precision(found: Findings, key: str, result: Precision, *, is_given: bool) -> None:
    """Set the precision and the base's dtype, which `key` gives (or its default).

    A 16-bit base under autocast is not modelled with a task that generates: the base is counted without autocast then, which
    keeps as much or more.
    """
    task = found.options.get("task")
    if result.base_dtype is not None and task is not None and task.value in ONLINE:
        result = Precision(result.base_dtype, note=f"autocast over a base in {result.base_dtype} is counted without it")
    for option, value in (("precision", result.precision), ("base_dtype", result.base_dtype)):
        if value is not None:
            found.take(option, key, value if is_given else None, value)
    if result.grad_dtype is not None:
        found.assume("grad_dtype", key, result.grad_dtype)
    if result.note:
        found.notes.append(f"{found.section.where(key)}: {result.note}")
