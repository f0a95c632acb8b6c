"""The drawing: it fits, with and without colour, in any encoding, and shows what the timeline has."""

from __future__ import annotations

import io
import re
from typing import IO

import pytest
from pictured import SETUPS, pictured
from rich.cells import cell_len

from memcalc.pictures.chart import print_timeline
from memcalc.pictures.timeline import Timeline
from memcalc.units import GIB, show_bytes


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Ascii(io.StringIO):
    """A file that can only print ASCII."""

    encoding = "ascii"


def drawn(timeline: Timeline, file: IO[str] | None = None) -> str:
    out = io.StringIO() if file is None else file
    print_timeline(timeline, out)
    assert isinstance(out, io.StringIO)
    return out.getvalue()


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def rows(text: str) -> list[str]:
    """The rows of the drawing, the lowest first, without the axis at the left."""
    lines = text.splitlines()
    (axis,) = (i for i, line in enumerate(lines) if line[9:10] in ("└", "+"))
    return [line[10:] for line in reversed(lines[axis - 16 : axis])]


@pytest.mark.parametrize("width", [60, 80, 137, 200])
@pytest.mark.parametrize("name", SETUPS)
def test_it_fits_the_width(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for file in (None, Terminal()):
        text = re.sub(r"\x1b\[[0-9;]*m", "", drawn(pictured(name)[1], file))
        assert max(map(cell_len, text.splitlines())) <= width


def test_a_pipe_has_no_colour_and_letters() -> None:
    text = drawn(pictured("none")[1])
    assert "\x1b" not in text
    assert {"P", "O", "A"} <= set("".join(rows(text)))
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_a_terminal_has_colours_and_blocks() -> None:
    text = drawn(pictured("none")[1], Terminal())
    assert "\x1b[34m█" in text
    assert "█" in text


def test_without_blocks_it_is_ascii() -> None:
    text = drawn(pictured("none")[1], Ascii())
    assert text.isascii()
    assert re.search(r"v peak|B v", text)


@pytest.mark.parametrize("name", SETUPS)
def test_the_letters_of_a_column_are_its_bytes(name: str) -> None:
    """Every component has as many letters in the highest column as it has sixteenths of the peak, to one."""
    _, timeline = pictured(name)
    text = drawn(timeline)
    marks = [line for line in text.splitlines() if "▼" in line]
    column = marks[0].index("▼") - 10
    letters = "".join(row[column : column + 1] for row in rows(text))
    live = timeline.live()
    for component, letter in (
        ("parameters", "P"),
        ("optimizer_states", "O"),
        ("gradients", "G"),
        ("saved_activations", "A"),
    ):
        share = 16 * live[component][timeline.peak_event] / timeline.peak
        assert abs(letters.count(letter) - share) <= 1


def test_it_says_what_is_alive_at_the_peak() -> None:
    _, timeline = pictured("none")
    text = drawn(timeline)
    assert f"peak {show_bytes(timeline.peak)}" in text
    live = timeline.live()
    for component in ("parameters", "optimizer_states", "gradients"):
        assert f"{component.replace('_', ' ')} {show_bytes(live[component][timeline.peak_event])}" in text
    assert re.search(r"12 x  model\.layers\.\*\.mlp\.", text)


def test_phases_micro_batches_and_layers_are_below_the_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert re.search(r"│forward +│backward +│", drawn(pictured("none")[1]))
    text = drawn(pictured("none, accumulating")[1])
    assert re.search(r"│forward 1 *│backward 1 *│forward 2", text)
    assert "3 of 5 micro-batches are shown" in text
    assert "│layers 11 to 0" in text


def test_the_gpus_memory_is_a_line_if_it_is_near() -> None:
    _, timeline = pictured("none")
    near, far = (drawn(timeline._replace(capacity=capacity)) for capacity in (timeline.peak * 5 // 4, 80 * GIB))
    assert "─────" in "".join(rows(near))
    assert "the level line" in near
    assert "─────" not in "".join(rows(far))
    assert "80.00 GiB, above the drawing" in far


def test_a_pipelines_rank_is_named() -> None:
    report, timeline = pictured("megatron, stages")
    assert (f"pipeline rank {report.rank.number}" in drawn(timeline)) == (report.rank.number > 0)
    assert "pipeline rank 3" in drawn(timeline._replace(rank=3))
