"""Bars are to one scale: a full bar is the peak."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.core.rows import COMPONENTS
from memcalc.report.bars import bar, full_bar
from memcalc.report.table import print_report

EIGHTHS = dict(zip(" ▏▎▍▌▋▊▉█", range(9), strict=True))


def length(shown: str) -> float:
    """Of a bar, in cells."""
    return sum(map(EIGHTHS.__getitem__, shown)) / 8


@given(part=st.integers(0, 10**13), more=st.integers(0, 10**13), full=st.integers(1, 20))
def test_a_bar_is_its_part_of_a_full_one(part: int, more: int, full: int) -> None:
    whole = part + more + 1
    shown = bar(part, whole, full)
    assert len(shown) <= full
    assert bool(shown) is (part > 0)
    assert length(shown) == pytest.approx(full * part / whole, abs=1 / 8)
    assert length(bar(whole, whole, full)) == full


@pytest.mark.parametrize("width", [70, 80, 100, 200])
def test_every_bar_of_a_table_is_whole_at_any_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    report = memcalc.estimate("llama-7b", gpus=8, zero=3)
    file = io.StringIO()
    print_report(report, rows=False, file=file)
    lines = file.getvalue().split("Memory per GPU")[1].split("\npeak ")[0].splitlines()[2:]
    shown = [re.findall(r"B +([█▏▎▍▌▋▊▉]+)  ", line) for line in lines]
    sizes = [sum(i.at_peak for i in report.items if i.component == component) for component in COMPONENTS]
    assert len(shown) == len(sizes)
    for size, found in zip(sizes, shown, strict=True):
        assert len(found) == (size > 0)
        for one in found:
            assert length(one) == pytest.approx(full_bar(width) * size / report.peak, abs=1 / 8)


def test_the_scale_is_as_wide_as_the_console_has_room() -> None:
    assert [full_bar(width) for width in (40, 70, 80, 100, 200)] == [1, 5, 10, 20, 20]
