"""Step times that others have measured and published, as setups: tests/published_step_times.json."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import memcalc
from memcalc.timing.step import StepTime

FILE = Path(__file__).with_name("published_step_times.json")


class PublishedTime(NamedTuple):
    """A published step time, and the setup that it was measured with."""

    id: str
    measured_by: str
    source: str
    setup: dict[str, Any]
    seconds_per_step: float
    notes: str

    def estimate(self) -> memcalc.Report:
        options = dict(self.setup)
        return memcalc.estimate(_model(json.dumps(options.pop("model"))), **options)

    @property
    def predicted(self) -> float:
        """Return the estimate's seconds."""
        return _seconds(self.id)

    @property
    def error(self) -> float:
        """Return the estimate over the measured time, less 1."""
        return self.predicted / self.seconds_per_step - 1


@cache
def published_times() -> tuple[PublishedTime, ...]:
    return tuple(PublishedTime(**row) for row in json.loads(FILE.read_text()))


@cache
def _model(of: str) -> memcalc.Model:
    """Return a model, given as JSON: one for all its rows, so that its runs are shared."""
    return memcalc.load_model(json.loads(of))


@cache
def _seconds(of: str) -> float:
    (row,) = (one for one in published_times() if one.id == of)
    time = row.estimate().time
    assert isinstance(time, StepTime), time
    return time.seconds
