"""Markup: what is escaped, what a size says, how a table is built."""

from __future__ import annotations

import pytest
from page_tree import exact, parsed, table_cells

from memcalc.pictures.html.markup import (
    Cell,
    Markup,
    drawing,
    element,
    joined,
    of_bytes,
    of_exact_bytes,
    size,
    table,
)

NASTY = '</script><script>alert("1")</script>&amp;\'<img src=x onerror=alert(1)>'


def test_words_are_escaped_and_come_back_as_they_were() -> None:
    root = parsed(element("p", NASTY, title=NASTY))
    paragraph = root.one("p")
    assert paragraph.text == NASTY
    assert paragraph.attributes["title"] == NASTY
    assert root.all("*") == [paragraph]


def test_markup_is_kept() -> None:
    assert element("p", element("b", "a"), " < ", None) == "<p><b>a</b> &lt; </p>"
    assert joined([Markup("<br>"), "<br>"]) == "<br>&lt;br&gt;"


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (element("input", type="search", hidden=""), '<input type="search" hidden="">'),
        (element("rect", width=2.5, class_="a", data_bytes=None), '<rect width="2.5" class="a"/>'),
        (element("rect", element("title", "a")), "<rect><title>a</title></rect>"),
        (element("th", "a", aria_sort="none", for_="b"), '<th aria-sort="none" for="b">a</th>'),
    ],
)
def test_elements(made: str, text: str) -> None:
    assert made == text


def test_a_size_has_its_exact_bytes() -> None:
    assert size(3 * 2**30 + 1) == '<data value="3221225473" title="3,221,225,473 B">3.00 GiB</data>'


def test_a_table() -> None:
    lines = [[Cell("a", code=True), of_bytes(2**20)], [Cell("<b>"), of_exact_bytes(7)]]
    root = parsed(table("Two <rows>", ["name", "bytes"], lines, last_is_total=True, id="t"))
    own = root.one("table", id="t")
    box = root.one("div", tabindex="0", role="region")
    assert box.attributes["aria-label"] == own.one("caption").text == "Two <rows>"
    assert [cell.attributes.get("class") for cell in own.one("thead").all("th")] == [None, "number"]
    (first, bytes_of_first), (total, bytes_of_total) = table_cells(own)
    assert (first.tag, first.attributes) == ("th", {"class": "code", "scope": "row"})
    assert bytes_of_first.attributes == {"class": "number", "data-n": "1048576"}
    assert (total.text, exact(bytes_of_total)) == ("<b>", 7)
    assert bytes_of_total.text == "7 B7 B"
    assert own.one("tfoot").all("th") == [total]


def test_a_table_without_lines() -> None:
    assert table_cells(parsed(table("none", ["a"], [])).one("table")) == []


def test_a_picture_has_a_title_and_a_description() -> None:
    picture = parsed(drawing("a < b", "c", element("rect"), identifier="p", width="100%")).one("svg")
    title, description = picture.one("title"), picture.one("desc")
    assert (title.text, description.text) == ("a < b", "c")
    assert picture.attributes["aria-labelledby"] == title.attributes["id"]
    assert picture.attributes["aria-describedby"] == description.attributes["id"]
    assert picture.attributes["role"] == "img"
