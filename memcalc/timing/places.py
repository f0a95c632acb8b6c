"""The time of each place of a run: its kernels, in forward and in backward of each layer and outside the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.estimation.compute import after_layers, by_place
from memcalc.timing.kernels import Unknown, products, streams

if TYPE_CHECKING:
    from memcalc.estimation.compute import Computed, Moved, Place
    from memcalc.setup.setup import Setup
    from memcalc.tape.runs import Trace
    from memcalc.timing.kernels import Rates


def seconds_by_place(run: Trace, setup: Setup, rates: Rates) -> dict[Place, float] | Unknown:
    """Return the seconds of a run's kernels, once each, by place; Unknown if the time of one is not known."""
    out: dict[Place, float] = {}
    for place, kernels in by_place(run, setup).items():
        seconds = _seconds(*kernels, rates)
        if isinstance(seconds, Unknown):
            return seconds
        out[place] = seconds
    return out


def head_seconds(run: Trace, setup: Setup, rates: Rates) -> float | Unknown:
    """Return the seconds of the kernels that a run's forward has after its layers, and of those of their backward; Unknown if
    the time of one is not known."""
    return _seconds(*after_layers(run, setup), rates)


def _seconds(multiplied: list[Computed], moved: list[Moved], rates: Rates) -> float | Unknown:
    seconds = 0.0
    for timed in (products(multiplied, rates), streams(moved, rates)):
        if isinstance(timed, Unknown):
            return timed
        seconds += sum(item.seconds for item in timed)
    return seconds
