"""`memcalc.compare`: several setups side by side, each as `memcalc.estimate` reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memcalc.core.collector import without_collections
from memcalc.decisions.combinations import EXAMPLE, Combinations, combinations, listed
from memcalc.decisions.cost import Cost, check_price, cost_document, cost_of
from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.inputs.file_options import FILES
from memcalc.inputs.model import Model, load_model
from memcalc.report.document import (
    SCHEMA_VERSION,
    communication_document,
    fit_document,
    memory_document,
    model_document,
    setup_document,
)
from memcalc.report.time import time_document

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


@dataclass(frozen=True)
class Column:
    """One of the compared setups. `report` is None if the setup is refused, and `error` is the reason."""

    values: Mapping[str, Any]
    """The varied options of this setup."""
    report: Report | None
    error: str | None = None
    cost: Cost | None = None
    """None without a price, or if the time of a step is not known."""

    def to_dict(self) -> dict[str, Any]:
        """Return the column for JSON. Its sub-documents are those of `memcalc.estimate`; null for a refused setup."""
        one = self.report
        return {
            "values": dict(self.values),
            "model": None if one is None else model_document(one),
            "setup": None if one is None else setup_document(one),
            "memory": None if one is None else memory_document(one),
            "communication": None if one is None else communication_document(one),
            "time": None if one is None else time_document(one),
            "fit": None if one is None else fit_document(one),
            "cost": cost_document(self.cost),
            "error": self.error,
        }


@dataclass(frozen=True)
class Compared:
    """Setups that differ in the options `varied`."""

    fixed: Mapping[str, Any]
    varied: tuple[str, ...]
    columns: tuple[Column, ...]

    @without_collections()
    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "schema_version": SCHEMA_VERSION,
            "varied": list(self.varied),
            "columns": [column.to_dict() for column in self.columns],
        }


def compare(model: Any = None, *, params: Any = None, price: Any = None, **options: Any) -> Compared:
    """Return the estimates of every combination of the given values.

    Give `model`, `params` and `options` as for `memcalc.estimate`; each may be a list of values. `price` is that of a GPU for
    an hour: one number, or a number for each value of `gpu`. A combination that is refused is a column with an `error`. Raise
    InputError if a value is wrong by itself, if nothing is varied, or if every combination is refused.
    """
    names_a_model = any(options.get(name) is not None for name in FILES)
    if (model is None) == (params is None) and not (model is None and names_a_model):
        raise InputError(f"--model or --params: exactly one of them is needed; as in: {EXAMPLE}")
    asked = combinations({"model": _loaded(model), "params": params, **options})
    prices = _prices(price, asked)
    columns = tuple(_column(asked.fixed, values, prices) for values in asked.each)
    if all(column.report is None for column in columns):
        raise InputError(f"compare: every combination is refused; the first: {columns[0].error}")
    return Compared(asked.fixed, asked.varied, columns)


def _loaded(given: Any) -> list[Model] | None:
    """Return the given models; those of the same text once."""
    if given is None:
        return None
    return [load_model(one) for one in _each_once(listed(given))]


def _each_once(models: list[Any]) -> list[Any]:
    texts = [one if isinstance(one, str) else id(one) for one in models]
    return [one for number, one in enumerate(models) if texts.index(texts[number]) == number]


def _column(fixed: Mapping[str, Any], values: Mapping[str, Any], prices: Mapping[str | None, float]) -> Column:
    given = {**fixed, **values}
    named = {name: value.name if isinstance(value, Model) else value for name, value in values.items()}
    try:
        report = estimate(**given)
    except InputError as error:
        return Column(named, None, str(error))
    price = prices.get(given.get("gpu"))
    return Column(named, report, None, None if price is None else cost_of(report, price))


def _prices(price: Any, asked: Combinations) -> Mapping[str | None, float]:
    """Return the price of each GPU; empty without a price. Raise InputError if prices and GPUs do not go together."""
    if price is None:
        return {}
    prices = [check_price(one) for one in listed(price)]
    gpus = list(dict.fromkeys({**asked.fixed, **values}.get("gpu") for values in asked.each))
    if gpus == [None]:
        raise InputError("--price: needs --gpu, the GPU whose steps are timed")
    if len(prices) not in (1, len(gpus)):
        raise InputError(f"--price: {len(prices)} prices for {len(gpus)} of --gpu; allowed: 1 price, or {len(gpus)}")
    return dict(zip(gpus, prices * (len(gpus) // len(prices)), strict=True))
