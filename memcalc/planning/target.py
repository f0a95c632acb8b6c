"""The purpose of a plan: the tokens to train on, the days or the money that they may take, and which plan is best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, cast

from memcalc.errors import InputError, one_line

OBJECTIVES: Final = ("time", "cost", "gpus")
_HOUR: Final = 3600.0
_DAY: Final = 24 * _HOUR
Key = tuple[float, ...]


class Target(NamedTuple):
    """The goal of a search. Times and costs are of all `tokens`; without these, of one step."""

    objective: str
    tokens_per_step: int
    tokens: int | None = None
    days: float | None = None
    prices: Mapping[str, float] | None = None
    """The price of one hour of one GPU, by the GPU's name, in any currency."""
    budget: float | None = None

    @property
    def steps(self) -> float:
        """Return the steps that the tokens take; 1 without tokens."""
        return 1.0 if self.tokens is None else self.tokens / self.tokens_per_step

    def gpu_hours(self, gpus: int, seconds: float) -> float:
        """Return the hours of all GPUs together. `seconds`: of one step."""
        return gpus * seconds * self.steps / _HOUR

    def cost(self, gpu: str, gpus: int, seconds: float) -> float | None:
        """Return the price of these hours; None without prices."""
        return None if self.prices is None else self.gpu_hours(gpus, seconds) * self.prices[gpu]

    def days_of(self, seconds: float) -> float | None:
        """Return the days that all tokens take; None without tokens."""
        return None if self.tokens is None else seconds * self.steps / _DAY

    def key(self, gpu: str, gpus: int, seconds: float) -> Key:
        """Return what a smaller one of is better. It grows with the seconds."""
        if self.objective == "cost":
            return self.cost(gpu, gpus, seconds) or 0.0, seconds
        return (float(gpus), seconds) if self.objective == "gpus" else (seconds, float(gpus))

    def is_met(self, gpu: str, gpus: int, seconds: float) -> bool:
        """Tell whether a layout is in time and within the budget."""
        days, cost = self.days_of(seconds), self.cost(gpu, gpus, seconds)
        late = self.days is not None and days is not None and days > self.days
        return not late and not (self.budget is not None and cost is not None and cost > self.budget)

    def without_limits(self) -> Target:
        """Return the target that every layout meets."""
        return self._replace(days=None, budget=None)


def prices_of(given: object, gpus: tuple[str, ...]) -> Mapping[str, float] | None:
    """Return the price of each GPU. `given`: a number, a text "2.5" or "h100-80gb=2.5,a100-80gb=1.2", or a mapping."""
    if given is None:
        return None
    from memcalc.inputs.gpu import named_gpu

    if isinstance(given, Mapping):
        pairs: list[tuple[object, object]] = [*cast("Mapping[object, object]", given).items()]
    elif isinstance(given, str) and "=" in given:
        pairs = [tuple(part.split("=", 1)) for part in given.split(",")]  # type: ignore[misc]
    else:
        return dict.fromkeys(gpus, positive("price", given))
    prices = {named_gpu(str(name).strip()).name: positive("price", price) for name, price in pairs}
    missing = [name for name in gpus if name not in prices]
    if missing:
        shown = one_line(cast(object, given))
        raise InputError(f"--price {shown}: has none for {missing[0]}; allowed: a price for every --gpu")
    return prices


def positive(name: str, given: object) -> float:
    """Return a number above 0, given as a number or as text."""
    try:
        value = float(given) if isinstance(given, (int, float, str)) and not isinstance(given, bool) else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        also = ", or NAME=NUMBER,... of each --gpu" if name == "price" else ""
        raise InputError(f"--{name} {one_line(given)}: allowed: a number above 0{also}")
    return value
