"""Columns are whole or left out, and what is left out is named."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

import memcalc
from memcalc.inputs.gpu import all_gpus, load_gpu
from memcalc.report import gpus, models
from memcalc.report.fitting import Column, fitting, needed
from memcalc.report.table import print_report
from memcalc.units import show_bytes, show_count

WIDTHS = [40, 60, 80, 100, 200]


class Terminal(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return request.param


def lines_of(file: io.StringIO) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()


def left_out(lines: list[str]) -> str:
    text = " ".join(" ".join(lines).split())
    return " ".join(re.findall(r"no room for: (.*?); --json has all", text))


def test_columns_go_in_the_order_that_is_said() -> None:
    columns = [Column("a", ["1234"]), Column("b", ["12"]), Column("c", ["123456"])]
    assert needed(columns) == 4 + 2 + 2 + 2 + 6
    assert fitting(columns, 16, ["b", "c"]) == (columns, "")
    assert fitting(columns, 15, ["b", "c"]) == (
        [columns[0], columns[2]],
        "no room for: b; --json has all",
    )
    assert [column.name for column in fitting(columns, 1, ["c", "b"])[0]] == ["a"]


def test_the_list_of_gpus_has_names_and_memory_whole(width: int) -> None:
    file = Terminal()
    gpus.print_list(all_gpus(), file)
    lines = lines_of(file)
    assert all(len(line) <= width for line in lines)
    for gpu, line in zip(all_gpus(), lines[1:], strict=False):
        assert line.startswith(f"{gpu.name} ")
        assert show_bytes(gpu.capacity) in line
    header = " ".join(lines[0].split())
    for column in ("full name", "bandwidth", "bf16", "fp8", "link"):
        assert (column in header) is (column not in left_out(lines)), column


def test_the_list_of_models_has_names_and_sizes_whole(width: int) -> None:
    chosen = [memcalc.load_model(name) for name in ("llama-7b", "gpt2", "granite-3.1-8b", "mixtral-8x7b")]
    file = Terminal()
    models.print_list(chosen, file)
    lines = lines_of(file)
    assert all(len(line) <= width for line in lines)
    for model, line in zip(chosen, lines[1:], strict=False):
        assert line.startswith(f"{model.name} ")
        assert show_count(model.num_parameters) in line
    for column in ("type", "layers", "also"):
        assert (column in lines[0].split()) is (column not in left_out(lines)), column


def test_a_gpu_has_every_number_and_source(width: int) -> None:
    file = Terminal()
    gpu = load_gpu("h100-80gb")
    gpus.print_gpu(gpu, file)
    shown = "".join("".join(lines_of(file)).split())
    assert "81008MiB" in shown
    if width < 90:  # beside the quantities their lines are folded
        for source in (gpu.memory.source, gpu.memory_bandwidth.source):
            assert "".join(source.split()) in shown


SETUPS: list[dict[str, Any]] = [
    {"gpus": 8, "zero": 3, "gpu": "a100-80gb"},
    {"gpus": 8, "tp": 2, "pp": 2, "gpu": "h100-80gb"},
    {"gpus": 4, "pp": 4},
]


@pytest.mark.parametrize("options", SETUPS, ids=str)
def test_a_column_of_a_report_is_there_or_named(options: dict[str, Any], width: int) -> None:
    file = Terminal()
    print_report(memcalc.estimate("gpt2", **options), rows=True, all_ranks=True, file=file)
    text = "\n".join(lines_of(file))
    memory, rest = text.split("Memory per GPU")[1].split("Communication per step and GPU")
    communication, rest = rest.split("Pipeline ranks")
    ranks, rows = rest.split("\nRows")
    for part, columns in (
        (memory, ("largest row",)),
        (communication, ("ranks", "calls", "payload", "wire", *(("time",) if "gpu" in options else ()))),
        (ranks, ("layers", "in flight", "parameters", "gradients", "optimizer", "saved", "buffers", "peak", "wire")),
        (rows, ("bytes", "at the peak")),
    ):
        before, *after = part.split("no room for:")
        shown, named = " ".join(before.split()[:24]), " ".join(" ".join(after).split())
        for column in columns:
            assert (column in shown) is (column not in named.split("--json")[0]), column


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_row_has_its_name_and_formula_at_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    report = memcalc.estimate("gpt2", seq_len=16)
    file = io.StringIO()
    print_report(report, rows=True, file=file)
    rows = file.getvalue().split("\nRows")[1]
    assert all(len(line) <= columns for line in rows.splitlines())
    for item in report.items:
        assert f"{item.nbytes:,}" in rows
        if columns < 130:  # wider, the formula is beside the name
            assert item.name[: columns - 45 if columns > 45 else 15] in rows
            assert item.formula[: columns - 45 if columns > 45 else 15] in rows
