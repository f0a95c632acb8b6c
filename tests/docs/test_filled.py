"""Places of a page that are written from the code."""

from __future__ import annotations

import filled
import pytest


def test_a_value_is_filled_in_and_the_rest_stays() -> None:
    assert filled.filled("a <!-- torch -->old<!-- /torch --> b") == "a <!-- torch -->2.13.0<!-- /torch --> b"
    assert filled.filled("<!-- not a pair --> a") == "<!-- not a pair --> a"


def test_an_output_is_filled_in() -> None:
    text = "<!-- output of: memcalc --version -->\n```text\nold\n```\n<!-- end of output -->\n"
    assert "\nmemcalc " in filled.filled(text) and "old" not in filled.filled(text)


def test_an_unknown_value() -> None:
    with pytest.raises(KeyError):
        filled.filled("<!-- nothing -->0<!-- /nothing -->")


@pytest.mark.parametrize("name", ["topics", "quiz session", pytest.param("evidence", marks=pytest.mark.slow)])
def test_filled_twice_is_filled_once(name: str) -> None:
    once = filled.filled(f"<!-- {name} -->\n<!-- /{name} -->")
    assert filled.filled(once) == once
