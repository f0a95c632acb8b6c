"""Linear layers of a class of their own: a subclass of nn.Linear with another forward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc.families.base.module import BASE, LinearCall, Module

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.core.tensor import Tensor


def own_linear(m: Module, x: Tensor, forward: Callable[[Module, Tensor], Tensor]) -> Tensor:
    """Run the linear layer `m`, whose forward is `forward`, with its adapter if it has one: peft wraps subclasses too
    (peft/tuners/lora/layer.py, dispatch_default)."""
    run, weight = m.run, m.weight()
    if run.called is not None:
        fan_out, fan_in = weight.shape
        run.called[m.path, m.layer] = LinearCall(fan_in, fan_out, m.optional("bias") is not None, x.dtype, len(x.shape))
    if run.adapters is not None and run.adapters.has(m.path, m.layer):
        return run.adapters.around(m, x, partial(forward, m / BASE))
    return forward(m, x)
