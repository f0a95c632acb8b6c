"""Optimizers: what each keeps between steps and what its step allocates, found by the name that `--optimizer` takes.

Every module but `base` is one, which is its constant OPTIMIZER.
"""

from __future__ import annotations

from memcalc.errors import InputError, nearest, one_line
from memcalc.optimizers.base import Optimizer, Parameter, State
from memcalc.registry import OPTIMIZERS

__all__ = ["OPTIMIZERS", "Optimizer", "Parameter", "State", "load_optimizer"]


def load_optimizer(name: str) -> Optimizer:
    """The optimizer of that name; InputError lists the known ones."""
    if name not in OPTIMIZERS:
        close = nearest(name, OPTIMIZERS, most=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"--optimizer {one_line(name)}: unknown; {hint}allowed: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
