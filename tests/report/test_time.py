"""The line on a step's time."""

from __future__ import annotations

import memcalc
from memcalc.report.folding import Folded
from memcalc.report.time import time_lines


def line(model: str) -> str:
    (folded,) = time_lines(memcalc.estimate(model, gpu="h100-80gb"))
    assert isinstance(folded, Folded)
    return str(folded.text)


def test_a_model_of_images_has_no_tokens() -> None:
    assert " images/s per GPU" in line("resnet-50")
    assert " tokens/s per GPU" in line("gpt2")
