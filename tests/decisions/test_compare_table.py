"""A comparison as printed: nothing is lost at any width."""

from __future__ import annotations

import io
import re

import pytest

import memcalc
from memcalc.decisions.compare import Compared
from memcalc.decisions.compare_rows import NOTHING, head_lines, value_lines
from memcalc.decisions.compare_table import print_compared


@pytest.fixture(scope="module")
def compared() -> Compared:
    return memcalc.compare(
        "llama-7b", gpus=8, zero=[1, 2, 3], engine=["deepspeed", "megatron"], gpu="a100-80gb", price=2
    )


def printed(compared: Compared, monkeypatch: pytest.MonkeyPatch, columns: int, *, bars: bool = False) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    file = io.StringIO()
    print_compared(compared, file, bars=bars)
    return file.getvalue()


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 240])
def test_nothing_is_lost(compared: Compared, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(compared, monkeypatch, columns, bars=True)
    assert max(map(len, text.splitlines())) <= columns
    assert "\x1b" not in text
    flat = " ".join(text.split())
    for line in (*head_lines(compared)[2:], *value_lines(compared)):
        assert line.label in flat
        for cell in set(line.cells) - {NOTHING}:
            assert flat.count(cell) >= line.cells.count(cell)
    for error in (column.error for column in compared.columns if column.error):
        assert error in flat
    marks = sum(len(line.best) for line in value_lines(compared))
    assert len(re.findall(r"\S \*(?=\s|$)", text)) == marks > 0


def test_columns_stand_side_by_side_or_below_each_other(compared: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = (printed(compared, monkeypatch, columns) for columns in (200, 60))
    assert len(re.findall(r"^peak +\d", wide, re.MULTILINE)) == 1
    assert len(re.findall(r"^  peak +\d", narrow, re.MULTILINE)) == 4
    assert len(re.findall(r"^zero \d · engine", narrow, re.MULTILINE)) == len(compared.columns)


def test_a_setup_that_does_not_fit_says_what_its_negative_room_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, fits in (("t4", False), ("h100-80gb", True)):
        compared = memcalc.compare("gpt2", gpus=2, zero=[0, 1], gpu=gpu, micro_batch_size=16)
        assert {column.report.fits for column in compared.columns if column.report is not None} == {fits}
        assert ("to spare below zero" in printed(compared, monkeypatch, 120)) == (not fits)
