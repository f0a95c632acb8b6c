"""docs/number.md and docs/formulas.md: what they add up."""

from __future__ import annotations

import re

import formulas
import number
import pytest

import memcalc

PAGE = number.page()


def table_after(heading: str) -> list[list[str]]:
    """The cells of the table rows of a section."""
    section = PAGE.split(heading)[1].split("\n## ")[0]
    return [
        [cell.strip(" *`") for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ][2:]


def as_int(cell: str) -> int:
    return int(cell.replace(",", ""))


def test_the_rows_of_saved_activations_sum_to_the_component() -> None:
    *rows, total = table_after("## 5. The component")
    assert sum(as_int(row[1]) for row in rows) == as_int(total[1])
    assert number.TENSOR in {row[0] for row in rows}


def test_what_is_alive_at_the_peak_sums_to_it() -> None:
    *rows, total = table_after("## 6. The peak")
    assert sum(as_int(row[2]) for row in rows) == as_int(total[2])


def test_the_tensor_is_its_dims() -> None:
    report = memcalc.estimate(number.MODEL, **number.SETUP)
    row = next(item for item in report.items if item.name == number.TENSOR)
    dims = dict(row.shape)
    assert row.nbytes == dims["layers"] * dims["batch"] * dims["seq"] * dims["ffn"] * 2
    assert f"{row.nbytes:,}" in PAGE
    assert "gate.linear(x)" in PAGE and "gated(m /" in PAGE


def test_no_place_of_the_page_is_left_open() -> None:
    assert not re.search(r"\{\w+\}", PAGE.replace("{_", ""))


@pytest.mark.parametrize("chapter", formulas.CHAPTERS, ids=lambda chapter: chapter.title)
def test_a_chapter_shows_its_own_command(chapter: formulas.Chapter) -> None:
    """The options of the command are those of the report."""
    words = chapter.command.split()
    given = {words[i].lstrip("-").replace("-", "_"): words[i + 1] for i in range(0, len(words), 2)}
    assert given.pop("m", None) == chapter.model
    assert given == {name: str(value) for name, value in chapter.options.items()}
