"""Optimizers: the states that each keeps between steps and the temporaries of its step, found by the name that
`--optimizer` takes.

Every module except `base` is one optimizer, its constant OPTIMIZER. Those of `of_deepspeed` run in DeepSpeed's engine alone.
"""

from __future__ import annotations

from memcalc.errors import InputError, nearest, one_line
from memcalc.optimizers.base import Optimizer, Parameter, State
from memcalc.registry import EVERY_OPTIMIZER, OPTIMIZERS

__all__ = ["EVERY_OPTIMIZER", "OPTIMIZERS", "Optimizer", "Parameter", "State", "load_optimizer"]


def load_optimizer(name: str) -> Optimizer:
    """Return the optimizer of that name. Raises InputError, with the known names, for any other."""
    try:
        return EVERY_OPTIMIZER[name]
    except KeyError:
        close = nearest(name, EVERY_OPTIMIZER, most=1)
        hint = f"did you mean {close[0]}? " if close else ""
        allowed = ", ".join(EVERY_OPTIMIZER)
        raise InputError(f"--optimizer {one_line(name)}: unknown; {hint}allowed: {allowed}") from None
