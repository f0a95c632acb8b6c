"""The rows as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest
from command import LLAMA

import memcalc
from memcalc.report.advice import advice
from memcalc.report.flat import HEADER, csv_text
from memcalc.report.markdown import markdown_text
from memcalc.report.per_layer import shares
from memcalc.units import show_bytes

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


PIPELINE: dict[str, Any] = {"model": LLAMA, "gpus": 8, "tp": 2, "pp": 2, "gpu": "h100-80gb"}


def read(text: str, table: str) -> list[dict[str, str]]:
    return [row for row in csv.DictReader(io.StringIO(text)) if row["table"] == table]


def test_csv_has_a_layers_part_and_every_rank_where_they_are_asked_for() -> None:
    report = memcalc.estimate(**PIPELINE)
    assert {row["table"] for row in csv.DictReader(io.StringIO(csv_text(report)))} == {"memory", "communication"}
    text = csv_text(report, per_layer=True, all_ranks=True)
    document = report.to_dict()
    layers = document["communication"]["per_layer_items"]
    assert layers
    assert [
        (
            row["axis"],
            row["phase"],
            row["component"],
            row["name"],
            float(row["calls"]),
            int(row["payload"]),
            row["formula"],
        )
        for row in read(text, "layer")
    ] == [
        (i["axis"], i["phase"], i["collective"], i["name"], pytest.approx(i["calls"]), i["payload"], i["formula"])
        for i in layers
    ]
    ranks = {(row["name"], row["component"]): row for row in read(text, "rank")}
    for rank in document["memory"]["ranks"]:
        name = f"pp {rank['pp']}"
        for total in ("parameters", "gradients", "optimizer_states", "saved_activations", "buffers", "peak", "device"):
            assert int(ranks[name, total]["nbytes"]) == rank[total]
        for size in ("payload", "wire"):
            assert int(ranks[name, "communication"][size]) == rank["communication"][size]


def test_a_layers_part_in_the_document_is_that_of_the_table() -> None:
    report = memcalc.estimate(**PIPELINE)
    items = report.to_dict()["communication"]["per_layer_items"]
    assert [(i["name"], i["layers"], i["calls"], i["payload"], i["wire"], i["formula"]) for i in items] == [
        (s.collective.name, s.layers, s.calls, s.payload, s.wire, s.formula) for s in shares(report)
    ]


def test_the_document_has_the_advice_of_the_table() -> None:
    report = memcalc.estimate("llama-7b", gpus=8, zero=1)
    found = report.to_dict()["advice"]
    assert found
    assert found == json.loads(json.dumps([change._asdict() for change in advice(report)]))


def test_markdown_has_the_setup_the_verdict_and_what_is_said() -> None:
    report = memcalc.estimate(**PIPELINE | {"precision": "bf16-mixed"})
    text = markdown_text(report)
    assert "8 GPUs · megatron · tp 2 · pp 2 · dp 2" in text
    assert "\n**fits NVIDIA H100 SXM5 80GB" in text
    for line in report.to_dict()["notes"]:
        assert f"\n- {line}\n" in text
    assert "**" not in markdown_text(memcalc.estimate("gpt2"))
    for word in ("## What one layer sends", "## Pipeline ranks"):
        assert word not in text


def test_markdown_has_a_layers_part_and_every_rank_where_they_are_asked_for() -> None:
    report = memcalc.estimate(**PIPELINE)
    text = markdown_text(report, per_layer=True, all_ranks=True)
    layers, ranks = text.split("## What one layer sends\n\n")[1].split("\n\n## Pipeline ranks\n\n")
    assert len(layers.splitlines()) == 2 + len(shares(report))
    for share, line in zip(shares(report), layers.splitlines()[2:], strict=True):
        assert cells(line)[3] == share.collective.name
        assert cells(line)[5:] == [str(share.payload), str(share.wire), share.formula]
    for one, line in zip(report.each_rank(), ranks.splitlines()[2:], strict=True):
        assert show_bytes(one.peak) in cells(line)
    for table in (layers, ranks):
        assert len({len(cells(line)) for line in table.splitlines()}) == 1
