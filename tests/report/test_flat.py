"""The rows as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

import pytest
from command import LLAMA

import memcalc
from memcalc.report.flat import HEADER, csv_text, markdown_text

SETUPS: list[dict[str, Any]] = [
    {"model": "llama-7b", "gpus": 8, "zero": 3},
    {"model": LLAMA, "gpus": 8, "gpu": "h100-80gb"},
    {"model": LLAMA, "optimizer": "adafactor"},
    {"params": "7B", "gpus": 4, "zero": 2},
]
each = pytest.mark.parametrize("setup", SETUPS)


@each
def test_csv_rows_are_the_items(setup: dict[str, Any]) -> None:
    report = memcalc.estimate(**setup)
    header, *lines = csv.reader(io.StringIO(csv_text(report)))
    assert tuple(header) == HEADER
    assert {len(line) for line in lines} == {len(HEADER)}
    read = [dict(zip(header, line, strict=True)) for line in lines]
    memory = [row for row in read if row["table"] == "memory"]
    items = [*report.items, *report.overheads]
    assert [(r["component"], r["name"], int(r["nbytes"]), int(r["at_peak"])) for r in memory] == [
        (i.component, i.name, i.nbytes, i.at_peak) for i in items
    ]
    assert [(r["formula"], r["basis"], r["source"]) for r in memory] == [(i.formula, i.basis, i.source) for i in items]
    assert sum(int(row["at_peak"]) for row in memory) == report.peak
    sent = [row for row in read if row["table"] == "communication"]
    assert len(memory) + len(sent) == len(read)
    assert [(r["name"], int(r["calls"]), int(r["payload"]), int(r["wire"])) for r in sent] == [
        (c.name, c.calls, c.payload, c.wire) for c in report.collectives
    ]


@each
def test_csv_has_plain_line_ends(setup: dict[str, Any]) -> None:
    text = csv_text(memcalc.estimate(**setup))
    assert "\r" not in text
    assert text.endswith("\n")


def cells(line: str) -> list[str]:
    assert line.startswith("|")
    assert line.endswith("|")
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@each
def test_markdown_tables_have_equal_columns(setup: dict[str, Any]) -> None:
    report = memcalc.estimate(**setup)
    text = markdown_text(report)
    assert text.startswith("# ")
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == (3 if report.collectives else 2)
    for table in tables:
        columns = {len(cells(line)) for line in table}
        assert len(columns) == 1
        assert all(re.fullmatch(r"-+:?", cell) for cell in cells(table[1]))
    totals, rows, *_ = tables
    assert {cells(line)[0]: cells(line)[1] for line in totals[2:]} == {
        name: str(getattr(report, name)) for name in ("peak", "allocated", "reserved", "device")
    }
    items = [*report.items, *report.overheads]
    assert [(cells(line)[2], cells(line)[3]) for line in rows[2:]] == [(str(i.nbytes), str(i.at_peak)) for i in items]


def test_a_name_is_one_heading() -> None:
    model = memcalc.load_model({**LLAMA, "_name_or_path": "a|b\nc"})
    assert markdown_text(memcalc.estimate(model)).splitlines()[1] == ""
