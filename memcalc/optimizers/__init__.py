"""Optimizers: what each keeps between steps and what its step allocates, found by the name that `--optimizer` takes."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from memcalc.errors import InputError, nearest, one_line
from memcalc.optimizers.optimizer import Optimizer, Parameter, State

__all__ = ["OPTIMIZERS", "Optimizer", "Parameter", "State", "load_optimizer"]

OPTIMIZERS: Final[dict[str, tuple[str, str]]] = {
    "adamw": ("memcalc.optimizers.adam", "ADAMW"),
    "adam": ("memcalc.optimizers.adam", "ADAM"),
    "sgd": ("memcalc.optimizers.sgd", "SGD"),
    "sgd-momentum": ("memcalc.optimizers.sgd", "SGD_MOMENTUM"),
    "adafactor": ("memcalc.optimizers.adafactor", "ADAFACTOR"),
    "lion": ("memcalc.optimizers.lion", "LION"),
    "adamw-8bit": ("memcalc.optimizers.adamw_8bit", "ADAMW_8BIT"),
    "muon": ("memcalc.optimizers.muon", "MUON"),
}
"""Name -> module and the optimizer in it, imported when it is asked for."""


def load_optimizer(name: str) -> Optimizer:
    """The optimizer of that name; InputError lists the known ones."""
    if name not in OPTIMIZERS:
        close = nearest(name, OPTIMIZERS, most=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"--optimizer {one_line(name)}: unknown; {hint}allowed: {', '.join(OPTIMIZERS)}")
    module, attribute = OPTIMIZERS[name]
    return getattr(import_module(module), attribute)
