"""Bars of time and of memory, each kind to one scale."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group

import memcalc
from memcalc.decisions.compare import Compared
from memcalc.decisions.compare_bars import bar_lines, cells_of


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=7), st.integers(1, 60), st.floats(1, 5))
def test_the_cells_of_the_parts_add_up(parts: list[float], full: int, more: float) -> None:
    whole = sum(parts) * more or 1.0
    cells = cells_of(parts, whole, full)
    assert all(cell >= 0 for cell in cells)
    assert abs(sum(cells) - full * sum(parts) / whole) <= 0.5 + 1e-6
    for part, cell in zip(parts, cells, strict=True):
        assert abs(cell - full * part / whole) <= 1 + 1e-6


def shown(compared: Compared, width: int = 100) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(Group(*bar_lines(compared, width)))
    return file.getvalue()


@pytest.mark.parametrize("width", [30, 60, 100])
def test_the_longest_bar_is_full_and_the_others_are_in_proportion(width: int) -> None:
    compared = memcalc.compare("llama-7b", gpus=8, zero=[1, 3], gpu="a100-80gb", recompute=["none", "full"])
    text = shown(compared, width)
    time, memory = text.split("memory at the peak")
    full = min(60, width - 14)
    for part, read in ((time, lambda r: r.time.seconds), (memory, lambda r: r.peak)):
        values = [read(column.report) for column in compared.columns]
        lengths = [len(found) for found in re.findall(r"^  ([█▓▒░o=]+) [\d.]+ \w+$", part, re.MULTILINE)]
        assert lengths == [pytest.approx(full * value / max(values), abs=0.51) for value in values]
        assert max(lengths) == full
    assert "▓" in time.split("\n", 2)[2]


def test_a_column_without_a_number_says_why() -> None:
    text = shown(memcalc.compare("llama-7b", gpus=8, zero=[1, 3], engine=["deepspeed", "megatron"], gpu="h100-80gb"))
    assert text.count("refused") == 2
    text = shown(memcalc.compare("gpt2", seq_len=[64, 128], gpu=["80GB", "h100-80gb"]))
    assert text.count("not known: only the memory of ") == 2
    assert "time of a step" not in shown(memcalc.compare("gpt2", seq_len=[64, 128]))
