"""The range of a step's time: how far published times lie from the estimates of their setups (errors.json).

docs/generate.py makes the file from tests/published_step_times.json. A setup takes the range of the published runs of its
engine on its GPU's architecture, with or without a pipeline. If there are fewer than five, it takes the widest range of
all engines' runs there, else of all runs on the architecture, else of all runs: the first of these that has five. So do fp32
and GPUs whose speed is assumed: all published runs are in 16 bits on GPUs whose speed was measured. A range has the estimate
itself in it, so it begins there if all runs were slower than their estimates.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.hardware.speed import speed_of
from memcalc.inputs.files import read_bundled

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from memcalc.inputs.gpu import GPU
    from memcalc.setup.setup import Setup

FILE: Final = Path(__file__).with_name("errors.json")
_ENOUGH: Final = 5
"""The runs that make a range."""


class Range(NamedTuple):
    """The lowest and the highest published time over its estimate."""

    low: float
    high: float
    runs: int
    """The published runs of the same kind; 0: they are too few, and the range is that of other kinds too."""


class _Kind(NamedTuple):
    engine: str
    architecture: str
    pipeline: bool
    rows: int
    low: float
    high: float


@cache
def _kinds() -> tuple[_Kind, ...]:
    return tuple(_Kind(**kind) for kind in read_bundled(FILE)["kinds"])


def range_of(setup: Setup, gpu: GPU) -> Range:
    """Return the range of a setup's time on a GPU."""
    here = [kind for kind in _kinds() if kind.architecture == gpu.architecture]
    alike = [kind for kind in here if kind.pipeline == (setup.pp > 1)]
    comparable = setup.precision != "fp32" and setup.fp8_recipe is None and speed_of(gpu.name).basis == "measured"
    own = [kind for kind in alike if kind.engine == setup.engine] if comparable else []
    if _runs(own) >= _ENOUGH:
        return Range(*_widest(own), _runs(own))
    others = next((kinds for kinds in (alike, here) if _runs(kinds) >= _ENOUGH), _kinds())
    return Range(*_widest(others), 0)


def _runs(kinds: Iterable[_Kind]) -> int:
    return sum(kind.rows for kind in kinds)


def _widest(kinds: Collection[_Kind]) -> tuple[float, float]:
    return min(kind.low for kind in kinds), max(kind.high for kind in kinds)
