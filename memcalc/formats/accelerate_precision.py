"""The mixed precision of an accelerate configuration, and what each way of training makes of it."""

from __future__ import annotations

from typing import Final, NamedTuple

from memcalc.formats.found import Found, Value
from memcalc.formats.section import Section

WORDS: Final = ("no", "fp8", "fp16", "bf16")
"""PrecisionType of accelerate/utils/dataclasses.py."""


class Mixed(NamedTuple):
    """The mixed precision that the file asks for: "no" if it asks for none."""

    word: str
    top: Section
    key: str
    is_written: bool = True
    """Whether the file has the key, be it with "no"."""

    @property
    def where(self) -> str:
        """Return the place of the key for people."""
        return self.top.where(self.key)


def read_mixed(top: Section) -> Mixed:
    """Return the mixed precision. YAML reads no without quotes as false; an old switch fp16 stands for fp16."""
    key = "mixed_precision"
    value = top.raw(key)
    if value is not None:
        word = "no" if value is False else top.choice(key, WORDS)
        return Mixed(word or "no", top, key)
    # An old file: process_config takes the switch by its truth, and drops it beside mixed_precision.
    if key not in top.content and top.flag("fp16"):
        return Mixed("fp16", top, "fp16")
    return Mixed("no", top, key, is_written=False)


def in_autocast(mixed: Mixed) -> Found:
    """Return the precision under torch.autocast: of one GPU and of DDP, over weights that the script loads."""
    if mixed.word in ("no", "fp8"):
        return unmixed(mixed)
    note = (
        f"mixed_precision {mixed.word}: autocast over fp32 weights is estimated; over {mixed.word} weights, as some "
        f"scripts load them, it is --precision {mixed.word}."
    )
    return Found({"precision": Value(f"{mixed.word}-autocast", mixed.where)}, notes=(note,))


def in_shards(mixed: Mixed) -> Found:
    """Return the precision of FSDP: shards are raised to fp32 (fsdp2_prepare_model), and 16 bits are gathered and
    reduced (set_mixed_precision of FullyShardedDataParallelPlugin gives both dtypes)."""
    if mixed.word in ("no", "fp8"):
        return unmixed(mixed)
    precision = Value(f"{mixed.word}-mixed", mixed.where)
    return Found({"precision": precision, "grad_dtype": Value(mixed.word, mixed.where)})


def as_stored(mixed: Mixed) -> Found:
    """Return the precision of Megatron, which keeps 16-bit weights and fp32 masters, or makes a model in fp32."""
    if mixed.word == "fp8":
        return unmixed(mixed)
    if mixed.word == "no":
        return Found({"precision": Value("fp32", mixed.where, mixed.is_written)})
    return Found({"precision": Value(f"{mixed.word}-mixed", mixed.where)})


def unmixed(mixed: Mixed) -> Found:
    """Return the precision of fp8, and of no mixed precision, where weights have the dtype that the script loads. That
    is a default: TrainingArguments' bf16 and fp16 come before it (training_args.py)."""
    if mixed.word == "fp8":
        note = "mixed_precision fp8: the recipe of fp8_config is not read."
        return Found({"precision": Value("fp8-mixed", mixed.where)}, notes=(note,))
    shown = "no" if mixed.is_written else "is not given"
    note = (
        f"mixed_precision {shown}: weights and states are in the dtype that the script loads, fp32 unless --precision "
        "or TrainingArguments say more."
    )
    return Found({"precision": Value("fp32", f"{mixed.where} {shown}", is_given=False)}, notes=(note,))
