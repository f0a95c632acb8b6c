"""The answer as printed."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from memcalc.decisions.fit import Fit, fit
from memcalc.decisions.fit_lines import print_fit
from memcalc.units import show_bytes


def shown(found: Fit, monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    file = io.StringIO()
    print_fit(found, file)
    assert max(map(len, file.getvalue().splitlines())) <= columns
    assert "\x1b" not in file.getvalue()
    return " ".join(file.getvalue().split())


@pytest.mark.parametrize("columns", [40, 60, 100, 200])
def test_the_value_and_what_stops_the_next_one(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fit("micro-batch-size", "llama-7b", gpus=8, zero=3, gpu="a100-80gb")
    text = shown(found, monkeypatch, columns)
    assert found.next is not None and found.report.headroom is not None
    assert f"micro-batch-size {found.value} is the largest that fits" in text
    assert f"{show_bytes(found.report.headroom)} to spare" in text
    assert f"micro-batch-size {found.next.value} needs {show_bytes(found.next.over_by)} more than there is" in text
    assert show_bytes(found.next.row.grows_by) in text
    assert "others are not searched" in text
    assert "what makes it fit" not in text


def test_the_smallest_is_said_to_be_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fit("gpus", "llama-7b", engine="fsdp2", gpu="a100-40gb", max_gpus=64)
    text = shown(found, monkeypatch)
    assert f"gpus {found.value} is the smallest that fits" in text
    assert "smaller values that were tried" in text or not found.tried


@pytest.mark.parametrize(
    ("solve", "options", "words"),
    [
        ("seq-len", {"gpu": "a100-80gb"}, "memory is not the limit: gpt2 is made for 1024 positions"),
        ("micro-batch-size", {"gpu": "t4", "global_batch_size": 2}, "--global-batch-size 2 gives the GPU 2 sequences"),
        ("gpus", {"gpu": "t4"}, "the layout allows no fewer"),
    ],
)
def test_another_limit(solve: str, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words in shown(fit(solve, "gpt2", **options), monkeypatch)


def test_nothing_fits_and_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fit("micro-batch-size", "llama-7b", gpus=8, gpu="a100-80gb")
    text = shown(found, monkeypatch)
    assert found.next is not None
    assert "no micro-batch-size that was tried fits; closest is 1" in text
    assert f"{show_bytes(found.next.over_by)} too much" in text
    assert "what makes it fit" in text
    assert json.loads(json.dumps(found.to_dict()))["advice"][0]["flags"] in text


def test_model_states_only_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(fit("params", gpu="t4"), monkeypatch)
    assert "is the largest that leaves room: model states take" in text
    assert "activations are not known" in text
