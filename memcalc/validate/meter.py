"""Peaks of the phases of a step, by any counter of bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol


class Gauge(Protocol):
    """A counter of live bytes: those of now, and the most since the last `begin`."""

    @property
    def now(self) -> int: ...

    @property
    def highest(self) -> int: ...

    def begin(self) -> None: ...


class Meter:
    """The highest peak of each phase in one step."""

    def __init__(self, gauge: Gauge, gathered: Callable[[], int] = lambda: 0) -> None:
        """Begin without peaks. `gathered` returns the bytes of weights that an engine has gathered."""
        self.gauge, self._gathered = gauge, gathered
        self.peaks = {"forward": 0, "backward": 0, "step": 0}
        self.saved: int | None = None
        """The bytes that the first forward has left; None before a backward."""
        self._phase = ""
        self._before = 0

    def enter(self, phase: str) -> None:
        """Begin a phase, and end the one before it."""
        gc.collect()
        self.close()
        if phase == "backward" and self.saved is None:
            self.saved = self.gauge.now - self._gathered() - self._before
        self._phase, self._before = phase, self.gauge.now - self._gathered()
        self.gauge.begin()

    def close(self) -> None:
        """End the last phase."""
        if self._phase:
            self.peaks[self._phase] = max(self.peaks[self._phase], self.gauge.highest)
