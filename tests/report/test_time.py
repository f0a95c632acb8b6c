"""The line on a step's time."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.report.folding import Folded
from memcalc.report.time import show_range, time_lines
from memcalc.timing.step import StepTime


def line(model: str) -> str:
    (folded,) = time_lines(memcalc.estimate(model, gpu="h100-80gb"))
    assert isinstance(folded, Folded)
    return str(folded.text)


def test_a_model_of_images_has_no_tokens() -> None:
    assert " images/s per GPU" in line("resnet-50")
    assert " tokens/s per GPU" in line("gpt2")


@pytest.mark.parametrize(("low", "high", "kind"), [(1.0, 1.3, "faster"), (0.9, 1.0, "slower")])
def test_a_range_that_ends_at_the_estimate_says_why(low: float, high: float, kind: str) -> None:
    time = memcalc.estimate("gpt2", gpu="h100-80gb").time
    assert isinstance(time, StepTime)
    assert show_range(time).endswith(", by published runs")
    ends = time._replace(low=low * time.seconds, high=high * time.seconds)
    assert show_range(ends).endswith(f"no published run of its kind was {kind} than its estimate")
