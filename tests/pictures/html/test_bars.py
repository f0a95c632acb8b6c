"""Stacked bars: widths by bytes, and a limit that is drawn only where it is near."""

from __future__ import annotations

import pytest
from page_tree import exact, parsed

from memcalc.pictures.html.bars import Bar, bars, limit_words, percent

TWO = [Bar("a", {"parameters": 30, "gradients": 10}, marked=True), Bar("b", {"buffers": 20, "temporaries": 0}, "short")]


def test_widths_are_shares_of_the_longest_bar() -> None:
    root = parsed(bars("x", TWO))
    parts = [(r.attributes["data-component"], r.attributes["x"], r.attributes["width"]) for r in root.all("rect")]
    assert parts == [("parameters", "0%", "75%"), ("gradients", "75%", "25%"), ("buffers", "0%", "50%")]
    assert [exact(total) for total in root.all("span", class_="bar-total")] == [40, 20]
    assert len(root.all("div", class_="bar marked")) == 1


@pytest.mark.parametrize(("limit", "drawn"), [(None, 0), (50, 2), (64, 2), (65, 0), (20, 2)])
def test_a_limit_far_away_is_not_drawn(limit: int | None, drawn: int) -> None:
    root = parsed(bars("x", TWO, limit))
    assert len(root.all("line", class_="limit")) == drawn
    assert (limit_words(TWO, limit) is not None) == bool(drawn)
    if limit == 50:
        assert root.all("line")[0].attributes["x1"] == "100%"
        assert root.all("rect")[0].attributes["width"] == "60%"


def test_nothing_at_all() -> None:
    assert parsed(bars("x", [Bar("a", {"buffers": 0})])).all("rect") == []


def test_percent() -> None:
    assert [percent(1, 3), percent(0, 5), percent(5, 5)] == ["33.33%", "0%", "100%"]
