"""The cost of a step: the hours of its GPUs at a price that the user gives."""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.errors import InputError, one_line
from memcalc.timing.kernels import Unknown

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_HOUR: Final = 3600
_MOST: Final = 10**6
_BILLION: Final = 10**9


class Part(NamedTuple):
    """A part of the step's time and its cost on all GPUs."""

    name: str
    gpu_hours: float
    cost: float


class Cost(NamedTuple):
    """The cost of an optimizer step, in the currency of the price."""

    price: float
    """The price of a GPU for an hour."""
    parts: tuple[Part, ...]
    tokens: int | None
    """The tokens of a step; None for a model without sequences."""

    @property
    def per_step(self) -> float:
        return fsum(part.cost for part in self.parts)

    @property
    def gpu_hours(self) -> float:
        """Return the hours of all GPUs in a step."""
        return fsum(part.gpu_hours for part in self.parts)

    @property
    def per_billion_tokens(self) -> float | None:
        return None if not self.tokens else self.per_step / self.tokens * _BILLION


def check_price(given: object) -> float:
    """Return the price of a GPU for an hour. Raise InputError unless it is a number above 0."""
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not number or not 0 < given <= _MOST:  # pyright: ignore[reportOperatorIssue]
        raise InputError(f"--price {one_line(given)}: allowed: a number above 0, at most {_MOST}: a GPU for an hour")
    return float(given)  # pyright: ignore[reportArgumentType]


def cost_of(report: Report, price: float) -> Cost | None:
    """Return the cost of a report's step; None if its time is not known."""
    time, setup = report.time, report.setup
    if isinstance(time, Unknown):
        return None
    hours = {name: seconds * setup.gpus / _HOUR for name, seconds in time.breakdown.items()}
    parts = tuple(Part(name, each, each * price) for name, each in hours.items())
    tokens = setup.global_batch_size * (setup.seq_len or 0) if report.model.program.has_sequence else None
    return Cost(price, parts, tokens)


def cost_document(cost: Cost | None) -> Mapping[str, Any] | None:
    """Return the cost for JSON; its items add up to `per_step`."""
    if cost is None:
        return None
    return {
        "price_per_gpu_hour": cost.price,
        "gpu_hours_per_step": cost.gpu_hours,
        "per_step": cost.per_step,
        "per_billion_tokens": cost.per_billion_tokens,
        "items": [part._asdict() for part in cost.parts],
    }
