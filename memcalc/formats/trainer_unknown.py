"""Keys of training arguments that their tool does not know: those of a script's own are noted, and LLaMA-Factory refuses them.

Source: transformers/hf_argparser.py (parse_dict); LLaMA-Factory src/llamafactory/hparams/parser.py (ALLOW_EXTRA_ARGS); axolotl
utils/schemas/config.py, which drops them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from memcalc.errors import InputError, nearest, one_line
from memcalc.formats.found import Found
from memcalc.formats.section import Section
from memcalc.formats.trainer_known import OF_AXOLOTL, OF_LLAMA_FACTORY, OF_TRAINING_ARGUMENTS, OF_TRL

_MOST: Final = 6
"""The keys that a note names."""


class Keys(NamedTuple):
    """The keys of one tool, and what it does with others."""

    known: tuple[str, ...]
    """Texts of names with spaces."""
    others: str


TRAINER: Final = Keys(
    (OF_TRAINING_ARGUMENTS, OF_TRL),
    "not of TrainingArguments or TRL; a script of its own may read it, and memcalc does not",
)
AXOLOTL: Final = Keys((OF_AXOLOTL,), "not of axolotl, which drops it")


def with_unknown_noted(section: Section, found: Found, keys: Keys) -> Found:
    """Return the findings with a note that names keys which neither the tool nor memcalc reads, if there are any."""
    unread = _unknown(section, keys.known)
    if not unread:
        return found
    named = ", ".join(one_line(key) for key in unread[:_MOST])
    more = f" and {len(unread) - _MOST} more" if len(unread) > _MOST else ""
    return replace(found, notes=(*found.notes, f"{section.where(named)}{more}: {keys.others}"))


def refuse_what_llama_factory_does_not_know(section: Section) -> None:
    """Raise InputError for a key that LLaMA-Factory refuses, as none of its versions knows it."""
    known = (OF_TRAINING_ARGUMENTS, OF_LLAMA_FACTORY)
    unread = _unknown(section, known)
    if not unread:
        return
    close = nearest(unread[0], " ".join(known).split(), most=1)
    hint = f"; did you mean {close[0]}?" if close else " (LLaMA-Factory refuses it, too)"
    place = f"{section.option} {section.file}: " if section.file else f"{section.option}: "
    raise InputError(f"{place}{section.path}{one_line(unread[0])}: unknown key{hint}")


def _unknown(section: Section, known: tuple[str, ...]) -> list[str]:
    names = {name for text in known for name in text.split()}
    left = {key.removeprefix(section.path) for key in section.left()}
    return [str(key) for key in section.content if str(key) in left and key not in names]
