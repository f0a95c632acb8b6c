"""Values of several parameters with each other, of which a default run has enough to have each value once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def crossed(*values: Sequence[Any]) -> list[Any]:
    """Return all combinations as cases of one test; those without which each value is still in some case are `slow`."""
    first = {tuple(i % len(one) for one in values) for i in range(max(map(len, values)))}
    return [
        pytest.param(
            *(one[i] for one, i in zip(values, places, strict=True)),
            id="-".join(_name(one[i]) for one, i in zip(values, places, strict=True)),
            marks=() if places in first else pytest.mark.slow,
        )
        for places in product(*(range(len(one)) for one in values))
    ]


def _name(value: Any) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)
