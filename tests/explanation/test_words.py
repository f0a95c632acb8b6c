"""The language of a reader."""

from __future__ import annotations

import pytest

from memcalc.explanation.words import Words, language_of


@pytest.mark.parametrize(
    ("environment", "language"),
    [
        ({}, "en"),
        ({"LANG": "C.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_TW"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "en_US.UTF-8"}, "en"),
        ({"LANG": "de_DE.UTF-8", "LC_ALL": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, "zh"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8"}, "zh"),
    ],
)
def test_a_chinese_locale_is_read_in_chinese(environment: dict[str, str], language: str) -> None:
    assert language_of(environment) == language


def test_a_text_is_said_with_its_values() -> None:
    words = Words("{n} rows", "{n} 行")
    assert words.said("en", n=3) == "3 rows"
    assert words.said("zh", n=3) == "3 行"
    with pytest.raises(KeyError):
        words.said("zh")
