"""The option --lang."""

from __future__ import annotations


def language_option(lang: str | None) -> str:
    """Return the language that was asked for, else the locale's. Raise InputError if there is no such language."""
    from memcalc.errors import InputError, one_line
    from memcalc.explanation.words import LANGUAGES, language_of

    if lang is not None and lang not in LANGUAGES:
        raise InputError(f"--lang {one_line(lang)}: allowed: {', '.join(LANGUAGES)}")
    return lang or language_of()
