"""The time of moments: all of the step's kernels, once."""

from __future__ import annotations

from typing import Any

import pytest
from pictured import LLAMA, SETUPS, pictured

import memcalc
from memcalc.pictures.clock import EACH, clock_of
from memcalc.pictures.notes import micro_batches_of
from memcalc.pictures.timeline import timeline_of
from memcalc.timing.step import StepTime

H100 = "h100-80gb"


@pytest.mark.parametrize("name", SETUPS)
def test_the_step_lasts_as_long_as_its_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcalc.pictures.clock.EACH", 0.0)
    report, timeline = pictured(name, H100)
    clock = clock_of(timeline, report)
    assert clock.is_time
    assert len(clock.at) == timeline.events + 1
    assert all(after >= before for before, after in zip(clock.at, clock.at[1:], strict=False))
    time = report.time
    assert isinstance(time, StepTime)
    multiplying = sum(item.seconds for item in time.items if item.part in ("forward", "backward", "recomputation"))
    updating = sum(item.seconds for item in time.items if item.part == "optimizer")
    step = timeline.spans[-1]
    if step.phase == "step" and step.first == step.last:
        updating = 0.0  # a fused step that allocates nothing has no moment
    shown = multiplying * micro_batches_of(timeline, report) / report.setup.micro_batches
    # gradients are added in all micro-batches but the first: in 5 of 6, and in 4 of the 5 that are shown
    assert clock.at[-1] * 1e-6 == pytest.approx(shown + updating, rel=1e-3)


def test_an_optimizer_whose_time_is_not_known_leaves_the_rest() -> None:
    """Muon multiplies in bf16, for which a T4 has no known rate."""
    report = memcalc.estimate(dict(LLAMA), gpu="t4", optimizer="muon", precision="fp16")
    timeline = timeline_of(report)
    clock = clock_of(timeline, report)
    assert clock.is_time
    step = timeline.spans[-1]
    assert step.phase == "step"
    assert clock.at[step.last] - clock.at[step.first] == pytest.approx((step.last - step.first) * EACH)


def test_a_layers_backward_lasts_twice_as_long() -> None:
    report, timeline = pictured("none", H100)
    clock = clock_of(timeline, report)
    forward, backward = (
        next(part for part in timeline.layers if (part.phase, part.layer) == (phase, 5))
        for phase in ("forward", "backward")
    )
    lengths = [clock.at[part.last] - clock.at[part.first] for part in (forward, backward)]
    assert 1.9 < lengths[1] / lengths[0] < 2.6  # attention's backward multiplies five matrices, its forward two


def test_without_a_gpu_it_is_no_time() -> None:
    report, timeline = pictured("none")
    clock = clock_of(timeline, report)
    assert clock.at == [float(moment) for moment in range(timeline.events + 1)]
    assert "not time" in clock.words


@pytest.mark.parametrize("options", [{"gpu": "80GB"}, {"gpu": "v100-16gb", "precision": "bf16"}])
def test_nor_with_a_gpu_whose_rate_is_not_known(options: dict[str, Any]) -> None:
    report = memcalc.estimate(dict(LLAMA), **options)
    assert report.seconds_at_peak is None
    assert not clock_of(timeline_of(report), report).is_time
