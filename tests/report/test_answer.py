"""The first lines of a report answer what was asked."""

from __future__ import annotations

import io
from typing import Any

import pytest
from command import LLAMA

import memcalc
from memcalc.report.table import print_report
from memcalc.units import show_bytes


def first_lines(**options: Any) -> str:
    report = memcalc.estimate(**options)
    file = io.StringIO()
    print_report(report, rows=False, file=file)
    return " ".join(file.getvalue().split("Memory per GPU")[0].split())


@pytest.mark.parametrize(
    ("options", "who"),
    [
        ({}, "one GPU"),
        ({"gpus": 2, "zero": 2}, "each GPU"),
        ({"gpus": 2, "pp": 2, "global_batch_size": 2}, "the fullest GPU"),
    ],
    ids=str,
)
def test_without_a_gpu_it_is_what_one_needs(options: dict[str, Any], who: str) -> None:
    report = memcalc.estimate(LLAMA, **options)
    shown = first_lines(model=LLAMA, **options)
    assert f"{who} needs {show_bytes(report.device)}: {show_bytes(report.peak)} of tensors" in shown
    assert "--gpu" in shown


def test_with_a_gpu_it_is_the_verdict() -> None:
    shown = first_lines(model=LLAMA, gpu="a100-80gb")
    assert "fits NVIDIA A100 SXM4 80GB" in shown
    assert "needs" not in shown


def test_a_size_alone_is_not_called_all_that_is_needed() -> None:
    shown = first_lines(params="7B")
    assert "model states take 104.31 GiB of one GPU; activations are not known without a model" in shown
    assert " needs " not in shown
