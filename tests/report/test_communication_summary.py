"""The communication in a few lines adds up what the full table lists."""

from __future__ import annotations

import io
from typing import Any

import pytest
from command import LLAMA

import memcalc
from memcalc.report.communication_summary import communication_summary, sent
from memcalc.report.consoles import console_for

SETUPS: list[dict[str, Any]] = [
    {"gpus": 8, "zero": 3},
    {"gpus": 8, "tp": 2, "pp": 2, "global_batch_size": 4},
    {"gpus": 8, "engine": "fsdp2", "zero": 3, "tp": 2},
    {"gpus": 4, "engine": "ddp"},
]


@pytest.mark.parametrize("options", SETUPS, ids=str)
@pytest.mark.parametrize("gpu", [None, "a100-80gb"])
def test_each_line_is_the_sum_of_its_collectives(options: dict[str, Any], gpu: str | None) -> None:
    report = memcalc.estimate(LLAMA, **options, gpu=gpu)
    lines = sent(report)
    assert len({line[:3] for line in lines}) == len(lines)
    for line in lines:
        own = [c for c in report.collectives if (c.axis, c.collective, c.group_size) == line[:3]]
        for name in ("calls", "payload", "wire"):
            assert getattr(line, name) == sum(getattr(c, name) for c in own)
    assert sum(line.payload for line in lines) == sum(c.payload for c in report.collectives)
    if gpu is None:
        assert {line.seconds for line in lines} == {None}
    else:
        known: list[Any] = report.costs
        assert sum(line.seconds or 0 for line in lines) == pytest.approx(sum(cost.seconds for cost in known))


def test_a_time_that_is_not_known_is_none() -> None:
    """GeForce cards have no known network: what crosses nodes has no time, and no total has one."""
    report = memcalc.estimate(LLAMA, gpus=16, gpu="rtx4090")
    assert None in {line.seconds for line in sent(report)}
    file = io.StringIO()
    console = console_for(file, 100)
    for part in communication_summary(report, 100):
        console.print(part)
    assert "?" in file.getvalue().split("all ")[-1].splitlines()[0]


@pytest.mark.parametrize("width", [30, 45, 60, 100])
def test_what_the_width_leaves_out_is_named(width: int) -> None:
    report = memcalc.estimate(LLAMA, gpus=8, zero=3, gpu="a100-80gb")
    file = io.StringIO()
    console = console_for(file, width)
    for part in communication_summary(report, width):
        console.print(part)
    shown = file.getvalue()
    head = shown.splitlines()[1].split()
    gone = [name for name in ("ranks", "calls", "wire", "time") if name not in head]
    assert "payload" in head
    assert (
        all(name in " ".join(shown.split()).split("no room for")[1] for name in gone)
        if gone
        else "no room" not in shown
    )
