"""Comma lists on the command line: the words of an option as values, and switches as options with a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from memcalc.cli.options import LENGTHS, tokens
from memcalc.errors import InputError
from memcalc.inputs.options import EFFICIENCIES, FLAGS, WHOLE, option_name

_STATES: Final = {"on": True, "off": False}


def with_values(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with a value after each bare switch: `--padded` becomes `--padded on`, `--no-padded` becomes
    `--padded off`."""
    on = {option_name(name): name for name in FLAGS}
    off = {f"--no-{name.replace('_', '-')}": option_name(name) for name in FLAGS}
    out: list[str] = []
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        if word in off:
            out += [off[word], "off"]
        elif word in on and not set(following.split(",")) <= set(_STATES):
            out += [word, "on"]
        else:
            out.append(word)
    return out


def values_of_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given as words with their values: a list for several words, else one value."""
    out: dict[str, Any] = {}
    for name, text in given.items():
        if isinstance(text, str):
            values = [_value(name, word) for word in dict.fromkeys(_words(name, text))]
            out[name] = values if len(values) > 1 else values[0]
    return out


def numbers(name: str, text: str | None) -> list[Any] | None:
    """Return the numbers of a comma list; a word that is no number stays a word."""
    return None if text is None else [_converted(float, word) for word in _words(name, text)]


def _words(name: str, text: str) -> list[str]:
    """Return the words of a comma list. Raise InputError for an empty word. A model's path may have commas."""
    if name == "model" and "," in text and len(text) < 256 and Path(text).exists():
        return [text]
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise InputError(f"{option_name(name)} {text or repr(text)}: a value is empty; expected values with commas")
    return words


def _value(name: str, word: str) -> Any:
    """Return a word as the option's value; a word that is none stays a word, which `check_options` refuses."""
    if name in LENGTHS:
        return tokens(word)
    if name in FLAGS:
        return _STATES.get(word, word)
    if name in WHOLE:
        return _converted(int, word)
    if name in (*EFFICIENCIES, "network_gbps", "expert_imbalance", "lora_dropout"):
        return _converted(float, word)
    return word


def _converted(kind: Callable[[str], Any], word: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        return word
