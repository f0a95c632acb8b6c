"""The findings of a reader of a trainer's file: options and notes, collected key by key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from memcalc.errors import InputError, nearest, one_line, quoted
from memcalc.formats.found import Found, Value
from memcalc.formats.section import Section

OPTION: Final = "--training-args"
_PLACEHOLDER: Final = re.compile(r"\$\{|\{\{|^<.*>$|^CONFIG_|^\$[A-Z_]+$|^(None|null)$")
_NAME: Final = re.compile(r"[\w.-]+")
_IN_ALL_LAYERS: Final = re.compile(
    r"[\w.\\]*layers\\?\.(\[\\d\]\+|\\d\+)\\?\.(\(_checkpoint_wrapped_module\\?\.\)\?)?"
    r"\([\w|]+\)\\?\.\((?P<names>\w+(\|\w+)*)\)(?P<tail>\w*)"
)
"""A pattern of axolotl's examples: modules of a few names in the attention and the MLP of each layer."""
_ANYWHERE: Final = re.compile(r"\(\.\*\\\.\)\?(?P<name>\w+(\\\.\w+)*)")
"""A pattern of all modules of one name, as peft wants it in place of a list of one, of which TRL's ModelConfig makes a text."""


class Findings:
    """Options, the model, named files and notes, each with the key that it is from."""

    __slots__ = ("files", "model", "notes", "options", "section")

    def __init__(self, section: Section) -> None:
        """Begin with nothing found in `section`."""
        self.section = section
        self.options: dict[str, Value] = {}
        self.files: dict[str, Value] = {}
        self.model: Value | None = None
        self.notes: list[str] = []

    def give(self, option: str, key: str, value: Any) -> None:
        """Set an option that a key of the file gives; None says nothing."""
        if value is not None:
            self.options[option] = self.section.value(key, value)

    def assume(self, option: str, key: str, value: Any) -> None:
        """Set an option to what the tool uses if a key is not there. Another file's value comes before it."""
        self.options[option] = self.section.default(key, value)

    def take(self, option: str, key: str, value: Any, default: Any) -> None:
        """Set an option to what a key gives, or to the tool's default if it gives nothing."""
        if value is None:
            self.assume(option, key, default)
        else:
            self.give(option, key, value)

    def note(self, key: str, what: str) -> None:
        """Say of a key and its value what is assumed instead: "ds.yaml: packing True: ..."."""
        value = self.section.raw(key)
        shown = "" if value is None else f" {quoted(value, 60)}"
        self.notes.append(f"{self.section.where(key)}{shown}: {what}")

    def note_each(self, notes: Mapping[str, str]) -> None:
        """Note each of these keys that is switched on: not null, false, 0, "" or empty."""
        for key, what in notes.items():
            if is_on(self.section, key):
                self.note(key, what)

    def refuse_each(self, refused: Mapping[str, str]) -> None:
        """Raise InputError for the first of these keys that is switched on."""
        for key, allowed in refused.items():
            if is_on(self.section, key):
                self.section.refuse(key, allowed)

    def switch(self, key: str, default: bool) -> Value:
        """Return what a switch of the file gives, or the tool's default."""
        given = self.section.flag(key)
        return self.section.default(key, default) if given is None else self.section.value(key, given)

    def found(self) -> Found:
        """Return all that was found."""
        return Found(self.options, self.model, self.files, tuple(self.notes))


def is_on(section: Section, key: str) -> bool:
    """Tell whether a key has a value that switches something on. Words that YAML reads as false are off."""
    value = section.raw(key)
    if isinstance(value, str):
        return value.strip().lower() not in ("", "false", "no", "off", "n", "f", "0", "none", "null")
    return bool(value)


def name(section: Section, key: str, what: str) -> str | None:
    """Return the name or path at a key; None if it is not there. Raises InputError for a placeholder."""
    text = section.text(key)
    if text is None:
        return None
    if not text.strip() or _PLACEHOLDER.search(text.strip()):
        section.refuse(key, f"allowed: {what}")
    return text.strip()


def modules(section: Section, key: str) -> str | None:
    """Return names of modules, joined with commas; None if it is not there or empty. Raises InputError for patterns but
    those that name modules of all layers."""
    value = section.raw(key)
    parts = cast("list[object]", value) if isinstance(value, list) else [value]
    text = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else ""
    pattern = _IN_ALL_LAYERS.fullmatch(text)
    if pattern is not None:
        return ",".join(f"{one}{pattern['tail']}" for one in pattern["names"].split("|"))
    pattern = _ANYWHERE.fullmatch(text)
    if pattern is not None:
        return pattern["name"].replace("\\.", ".")
    words = section.words(key)
    for word in words or ():
        if not _NAME.fullmatch(word):
            section.refuse(key, "allowed: names of modules (patterns are not modelled)")
    return ",".join(words) if words else None


def mapping(section: Section, key: str) -> Section:
    """Return the section at a key, also of JSON in a text, as TrainingArguments reads it."""
    value = section.raw(key)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            section.refuse(key, "allowed: a mapping, also as JSON")
    if value is not None and not isinstance(value, Mapping):
        section.refuse(key, "allowed: a mapping")
    return Section(section.option, section.file, cast("Mapping[str, Any]", value or {}), f"{section.path}{key}.")


def texts(section: Section, key: str, allowed: str) -> tuple[str, ...]:
    """Return the texts of a list, or of one text alone. Raises InputError for other values."""
    value = section.raw(key)
    if value is None:
        return ()
    parts = cast("list[object]", value if isinstance(value, list) else [value])
    if not all(isinstance(part, str) and part.strip() for part in parts):
        section.refuse(key, f"allowed: {allowed}")
    return tuple(str(part).strip() for part in parts)


def deepspeed_file(found: Findings) -> bool:
    """Note the DeepSpeed file that the key `deepspeed` names or holds. Tell whether there is one."""
    section, key = found.section, "deepspeed"
    value = section.raw(key)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = mapping(section, key).content
    if value is None or value is False or value in ("", {}):
        return False
    if isinstance(value, str):
        value = name(section, key, "a path to DeepSpeed's JSON, or its content")
    elif not isinstance(value, Mapping):
        section.refuse(key, "allowed: a path to DeepSpeed's JSON, or its content")
    found.files[key] = section.value(key, value)
    return True


def refuse_misspelt(section: Section, matter: Iterable[str], known: Iterable[str]) -> None:
    """Raise InputError for an unknown key that is a slip of the pen away from a key that matters.

    Other unknown keys belong to somebody's own script.
    """
    matter, known = tuple(matter), frozenset(known)
    for key in section.content:
        if key in known:
            continue
        close = nearest(str(key), matter, most=1, cutoff=0.9)
        if close and close[0] != key:
            place = f"{section.option} {section.file}: " if section.file else f"{section.option}: "
            raise InputError(f"{place}{section.path}{one_line(key)}: unknown key; did you mean {close[0]}?")
