"""Optimizers: the states that each keeps between steps and the temporaries of its step, found by the name that
`--optimizer` takes.

Every module except `base` is one optimizer, its constant OPTIMIZER.
"""

from __future__ import annotations

from memcalc.errors import InputError, nearest, one_line
from memcalc.optimizers.base import Optimizer, Parameter, State
from memcalc.registry import OPTIMIZERS

__all__ = ["OPTIMIZERS", "Optimizer", "Parameter", "State", "load_optimizer"]


def load_optimizer(name: str) -> Optimizer:
    """Return the optimizer of that name. Raises InputError, with the known names, for any other."""
    if name not in OPTIMIZERS:
        close = nearest(name, OPTIMIZERS, most=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"--optimizer {one_line(name)}: unknown; {hint}allowed: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
