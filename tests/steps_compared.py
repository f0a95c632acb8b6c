"""An estimate of FSDP2 over tensor or expert parallelism beside the real step: peaks of all phases and every collective."""

from __future__ import annotations

from collections import Counter
from typing import Any

from memcalc.core.dims import evaluate
from memcalc.estimation.report import Report


def phases(report: Report) -> list[int]:
    return [report.phases[phase] for phase in ("forward", "backward", "step")]


def of_the_plan(report: Report) -> Counter[tuple[str, str, int]]:
    """What a plan's modules send over the axes tp and ep."""
    return over_axis(report, "tp") + over_axis(report, "ep")


def over_axis(report: Report, axis: str) -> Counter[tuple[str, str, int]]:
    """(phase, collective, bytes of a call) -> calls."""
    out: Counter[tuple[str, str, int]] = Counter()
    for c in report.collectives:
        if c.axis == axis:
            out[c.phase, c.collective, c.payload // c.calls] += c.calls
    return out


def over_dp(report: Report) -> dict[tuple[str, int], tuple[int, int]]:
    """(collective, ranks) -> calls, bytes."""
    out: dict[tuple[str, int], tuple[int, int]] = {}
    for c in report.collectives:
        if c.axis == "dp":
            calls, payload = out.get((c.collective, c.group_size), (0, 0))
            out[c.collective, c.group_size] = calls + c.calls, payload + c.payload
    return out


def flops_of(report: Report) -> dict[str, int]:
    """By phase, where there are any."""
    return {phase: n for phase, n in report.flops.items() if n and phase != "total"}


def check_step_and_forward(report: Report, real: Any) -> None:
    """And what is alive at the end of forward, where that is of one micro-batch."""
    check_step(report, real)
    saved, always = report.rank.profiles[0].saved.poly, report.rank.sums.always
    if report.setup.micro_batches == 1:
        size = report.setup.micro_batch_size, report.setup.tokens_per_part
        assert evaluate(saved, *size) + evaluate(always, *size) == real.forward_end


def check_step(report: Report, real: Any) -> None:
    assert report.setup.engine == "fsdp2"
    assert phases(report) == [real.forward, real.backward, real.step]
    assert of_the_plan(report) == Counter(real.split)
    assert flops_of(report) == real.flops
    counted: dict[tuple[str, int], tuple[int, int]] = {}
    for kind, size, group in real.sent:
        calls, payload = counted.get((kind, group), (0, 0))
        counted[kind, group] = calls + 1, payload + size
    assert over_dp(report) == counted
