"""A topic's own options for those that the reader does not give, chosen to fit the given ones."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, prod
from typing import Any, Final

_DEGREES: Final = ("tp", "cp", "ep", "pp")


def completed(own: Mapping[str, Any], given: Mapping[str, Any], micro_batches: int = 1) -> dict[str, Any]:
    """Return the given options, and a topic's own for the others. Its degrees divide the given GPUs, its GPUs are a
    multiple of the given degrees, and each rank has `micro_batches` micro-batches."""
    options = {**own, **given}
    gpus = given.get("gpus")
    if isinstance(gpus, int) and gpus > 0:
        left = gpus // gcd(gpus, prod(_degrees(given)))
        for name in _DEGREES:
            if name in own and name not in given:
                options[name] = gcd(left, own[name]) if gcd(left, own[name]) > 1 else left
                left //= options[name]
    elif gpus is None and "gpus" in own:
        least = prod(_degrees({name: value for name, value in options.items() if name != "ep"}))
        options["gpus"] = own["gpus"] if own["gpus"] % least == 0 else least
    if micro_batches > 1 and "global_batch_size" not in given:
        split = prod(_degrees({name: value for name, value in options.items() if name != "ep"}))
        options["global_batch_size"] = (
            micro_batches * max(options["gpus"] // split, 1) * given.get("micro_batch_size", 1)
        )
    return options


def _degrees(options: Mapping[str, Any]) -> list[int]:
    """Return the degrees whose product has to divide the GPUs. Values that are no degree are left to the options' checks."""
    values = (options.get(name, 1) for name in _DEGREES)
    return [value for value in values if isinstance(value, int) and value > 0]
