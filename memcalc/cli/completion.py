"""Shell completion for the values of options: names of models and GPUs, and the allowed values."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Final

_ASKED_BY: Final = "_MEMCALC_COMPLETE"


def is_asked() -> bool:
    """Return True if a shell runs this process to complete a command line."""
    return _ASKED_BY in os.environ


def values_of(flag: str) -> Callable[[str], list[str]]:
    """Return the function that typer calls for the values of an option that begin with the typed text."""
    field = flag.removeprefix("--").replace("-", "_")

    def values(incomplete: str) -> list[str]:
        return [value for value in _known(field) if value.startswith(incomplete)]

    return values


def _known(field: str) -> Collection[str]:
    """Return all values of an option whose values are names; nothing for numbers and sizes."""
    if field == "model":
        from memcalc.inputs.model import model_names

        return model_names()
    if field == "gpu":
        from memcalc.inputs.gpu import AUTO, all_gpus

        return [*(gpu.name for gpu in all_gpus()), AUTO]
    from memcalc.inputs.options import CHOICES, WHOLE

    if field == "zero":
        low, high = WHOLE[field]
        return [str(stage) for stage in range(low, high + 1)]
    return CHOICES.get(field, ())
