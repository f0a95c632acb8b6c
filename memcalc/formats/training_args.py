"""`--training-args`: TrainingArguments of transformers in JSON or YAML, with what the files of TRL, alignment-handbook,
LLaMA-Factory and axolotl add. This file tells which of them a file belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from memcalc.errors import InputError
from memcalc.formats.axolotl import read_axolotl
from memcalc.formats.found import Found
from memcalc.formats.llama_factory import read_llama_factory
from memcalc.formats.section import Section
from memcalc.formats.trainer_args import MODEL, read_trainer_args
from memcalc.formats.trainer_findings import OPTION
from memcalc.formats.trainer_keys import BATCH, KNOWN, RECOMPUTE
from memcalc.formats.trainer_unknown import (
    AXOLOTL,
    TRAINER,
    refuse_what_llama_factory_does_not_know,
    with_unknown_noted,
)

_AXOLOTL: Final = ("base_model", "sequence_len", "base_model_config")
_LLAMA_FACTORY: Final = ("finetuning_type", "cutoff_len", "freeze_trainable_layers", "quantization_bit")
_V1: Final = ("dist_config", "kernel_config", "batching_strategy", "quant_config")
"""Keys of LLaMA-Factory's second trainer (USE_V1), whose files have other names for all else too."""
_SWIFT: Final = ("tuner_type", "train_type", "rlhf_type", "sft_type", "attn_impl", "model_author")
"""Keys of ms-swift alone (swift/arguments), whose other keys are TrainingArguments' with other defaults."""
_TRAINING: Final = (*BATCH, "gradient_accumulation_steps", *RECOMPUTE, "optim", "max_grad_norm", "bf16", "fp16")


def read(file: str, content: Mapping[str, Any]) -> Found:
    """Return what a file of training arguments says. Raises InputError."""
    section = Section(OPTION, file, content)
    _refuse_others(section)
    if any(key in section for key in _AXOLOTL) and not any(key in section for key in BATCH):
        return with_unknown_noted(section, read_axolotl(section), AXOLOTL)
    if any(key in section for key in _LLAMA_FACTORY):
        refuse_what_llama_factory_does_not_know(section)
        return read_llama_factory(section)
    inner = _inner(content)
    if inner is None:
        return with_unknown_noted(section, read_trainer_args(section), TRAINER)
    return _read_inner(section, inner)


def _refuse_others(section: Section) -> None:
    """Raise InputError for files that hold something else."""
    place = f"{OPTION} {section.file}: " if section.file else f"{OPTION}: "
    if any(key in section.content for key in _V1) and MODEL[0] not in section:
        raise InputError(f"{place}a file of LLaMA-Factory's v1 trainer; allowed: those of its main trainer")
    swift = next((key for key in _SWIFT if key in section), None)
    if swift is not None:
        raise InputError(
            f"{place}has the key {swift}: a file of ms-swift, whose defaults (adapters, recomputation) are not those of "
            "TrainingArguments and are not read; allowed: its values as options, such as --lora-rank 8 --recompute full"
        )
    for key, option in (("distributed_type", "--accelerate"), ("zero_optimization", "--deepspeed")):
        if key in section:
            raise InputError(
                f"{place}has the key {key}; expected a file of training arguments (this one is for {option})"
            )
    known = (*KNOWN, *MODEL, *_AXOLOTL, *_LLAMA_FACTORY)
    values: list[Any] = [section.content, *section.content.values()]
    holders = [cast("Mapping[str, Any]", value) for value in values if isinstance(value, Mapping)]
    if section.content and not any(key in holder for holder in holders for key in known):
        raise InputError(f"{place}has no key of TrainingArguments; expected a file of training arguments")


def _inner(content: Mapping[str, Any]) -> str | None:
    """Return the key of the section that holds the training arguments, if the file itself has none."""
    if any(key in content for key in (*_TRAINING, *MODEL[:1])):
        return None
    held = {
        str(key): sum(one in value for one in _TRAINING) for key, value in content.items() if isinstance(value, Mapping)
    }
    best = max(held, key=lambda key: held[key], default=None)
    return best if best is not None and held[best] >= 2 else None


def _read_inner(section: Section, inner: str) -> Found:
    """Return what a section of a script's own file says, with the model that another section may name."""
    part = section.section(inner)
    found = with_unknown_noted(part, read_trainer_args(part), TRAINER)
    others = [str(key) for key in section.content if key != inner]
    notes = (f"{section.where(', '.join(others))}: only {inner} is read of this file",) if others else ()
    model = found.model or _model_of(section, inner)
    return Found(found.options, model, found.files, (*found.notes, *notes))


def _model_of(section: Section, inner: str) -> Any:
    """Return the model that a section beside the training arguments names by transformers' own name of that key."""
    for key, value in section.content.items():
        if key != inner and isinstance(value, Mapping) and MODEL[0] in value:
            part = Section(section.option, section.file, cast("Mapping[str, Any]", value), f"{section.path}{key}.")
            text = part.text(MODEL[0])
            return None if text is None else part.value(MODEL[0], text)
    return None
