"""Options with several values: every combination of them is a setup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple, cast

from memcalc.errors import InputError
from memcalc.inputs.file_options import FILES
from memcalc.inputs.model import load_model
from memcalc.inputs.options import check_options, option_name

MOST: Final = 64
"""The most combinations that are compared: more columns are no table."""
EXAMPLE: Final = "memcalc compare llama-7b --gpus 8 --zero 1,2,3"


class Combinations(NamedTuple):
    """The options of several setups, as `memcalc.estimate` takes them, with `model` and `params`."""

    fixed: Mapping[str, Any]
    """The options that all setups share."""
    varied: tuple[str, ...]
    each: tuple[Mapping[str, Any], ...]
    """The varied options of each setup. The last option changes fastest."""


def combinations(given: Mapping[str, Any]) -> Combinations:
    """Return the combinations of the options' values; a list or tuple has several values, None counts as left out.

    Raise InputError if nothing is varied, if there are more than MOST combinations, or if a value is wrong by itself.
    """
    lists = {name: _values(name, value) for name, value in given.items() if value is not None}
    for name, values in lists.items():
        for value in values:
            _check(name, value)
    varied = {name: values for name, values in lists.items() if len(values) > 1}
    if not varied:
        raise InputError(f"compare: no option has several values; as in: {EXAMPLE}")
    count = prod(map(len, varied.values()))
    if count > MOST:
        raise InputError(f"compare: {_product(varied)} = {count} combinations; allowed: at most {MOST}")
    fixed = {name: values[0] for name, values in lists.items() if name not in varied}
    each = tuple(dict(zip(varied, values, strict=True)) for values in product(*varied.values()))
    return Combinations(fixed, tuple(varied), each)


def listed(given: Any) -> list[Any]:
    """Return the values of a list, tuple or range; any other value alone."""
    return list(cast("Sequence[Any]", given)) if isinstance(given, (list, tuple, range)) else [given]


def _values(name: str, given: Any) -> list[Any]:
    """Return the values of an option, each once, in the order in which they were given."""
    several = listed(given)
    if not several:
        raise InputError(f"{option_name(name)}: the list is empty; allowed: at least one value")
    out: list[Any] = []
    for value in several:
        if not any(value is one or (type(value) is type(one) and value == one) for one in out):
            out.append(value)
    return out


def _check(name: str, value: Any) -> None:
    """Raise InputError for a value that no other option could make right."""
    if name == "model":
        load_model(value)
    elif name in FILES:
        return  # what it says may depend on the other options
    elif name == "params":
        from memcalc.estimation.sizing import parse_params

        parse_params(value)
    else:
        check_options({name: value})
        if name == "gpu":
            from memcalc.inputs.gpu import load_gpu

            load_gpu(value)


def _product(varied: Mapping[str, Sequence[Any]]) -> str:
    return " · ".join(f"{len(values)} of {option_name(name)}" for name, values in varied.items())
