"""The lines of a table about a step's products of matrices."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.report.compute import compute_lines
from memcalc.units import show_flops


def lines(model: Any, **options: Any) -> list[str]:
    return [line.plain for line in compute_lines(memcalc.estimate(model, **options))]


def test_the_phases_of_a_step() -> None:
    assert lines("llama-7b") == [
        "matrix products per step and GPU: forward 29.3 TFLOP · backward 59.6 TFLOP · total 88.9 TFLOP"
    ]


def test_what_is_recomputed_is_told_as_a_share_of_the_rest() -> None:
    first, time = lines("llama-7b", recompute="full", gpu="a100-80gb")
    assert first.endswith("backward 59.6 TFLOP · recomputation 22.8 TFLOP (+26%) · total 112 TFLOP")
    assert time.startswith("time: at least 358 ms (forward 93.8 ms, the rest 264 ms) at the data sheet's dense rate")


def test_a_rate_that_is_not_known() -> None:
    report = memcalc.estimate("llama-7b", gpu="a100-80gb")
    assert report.gpu is not None
    report.gpu = report.gpu._replace(dense_flops_per_second={})
    assert compute_lines(report)[1].plain == "time: not known, because the rate of a100-80gb is not known for bf16"


def test_no_model_no_line() -> None:
    report = memcalc.estimate(params="7.5B")
    assert compute_lines(report) == []
    assert report.seconds_at_peak is None


@pytest.mark.parametrize(
    ("flops", "shown"),
    [(0, "0 FLOP"), (999, "999 FLOP"), (29_261_612_187_648, "29.3 TFLOP"), (999_600_000_000, "1 TFLOP"),
     (999_400_000_000, "999 GFLOP"), (3 * 10**18, "3 EFLOP")],
)  # fmt: skip
def test_flops_for_people(flops: int, shown: str) -> None:
    assert show_flops(flops) == shown
