"""Sentences in both languages, and the choice of the reader's language."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

LANGUAGES: Final = ("en", "zh")


class Words(NamedTuple):
    """One text in English and in Chinese, with the same `{placeholders}`."""

    en: str
    zh: str

    def said(self, language: str, **values: object) -> str:
        """Return the text in a language, with values in its placeholders. Raise KeyError for one without a value."""
        return (self.zh if language == "zh" else self.en).format(**values)


def language_of(environment: Mapping[str, str] = os.environ) -> str:
    """Return "zh" if the locale of the environment is Chinese, else "en": LC_ALL counts before LC_MESSAGES and LANG."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        locale = environment.get(name)
        if locale:
            return "zh" if locale.lower().startswith(("zh", "chinese")) else "en"
    return "en"
