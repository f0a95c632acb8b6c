"""AdamW: torch/optim/adamw.py, which is torch/optim/adam.py with decoupled weight decay.

AdamW needs no copy of the gradient: weight decay multiplies the parameter in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from memcalc.core.dtypes import DType, fp32
from memcalc.core.tensor import Memory, Tensor
from memcalc.optimizers.base import (
    Optimizer,
    Parameter,
    State,
    like_parameter,
    one_by_one,
    temporaries,
    temporary,
    then,
)

_SOURCE: Final = "torch/optim/adam.py: Adam._init_group"


@dataclass(frozen=True, slots=True)
class Adam(Optimizer):
    """Adam, which keeps two moments of every parameter."""

    elementwise: ClassVar[bool] = True

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        states: list[State] = []
        for parameter in parameters:
            if implementation == "fused":
                # The fused kernel reads its step counters on the GPU; the other two keep them on the CPU.
                states.append(State("step", parameter, (), fp32, parameter.count, _SOURCE))
            own = parameter.dtype or dtype
            states.append(like_parameter("exp_avg", parameter, own, _SOURCE))
            states.append(like_parameter("exp_avg_sq", parameter, own, _SOURCE))
        return states

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        self.check(implementation)
        if implementation == "for-loop":
            _single_tensor_adam(memory, parameters, dtype)
        elif implementation == "foreach":
            _multi_tensor_adam(memory, parameters, dtype)
        # _fused_adam is one kernel that updates in place.


OPTIMIZER: Final = Adam("adamw", ("foreach", "fused", "for-loop"))


def _single_tensor_adam(memory: Memory, parameters: Sequence[Parameter], dtype: DType) -> None:
    denom: Tensor | None = None
    for parameter in one_by_one(memory, parameters):
        # (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps), while `denom` still holds the last parameter's
        denom = then(temporary(memory, parameter.shape, parameter.dtype or dtype, "exp_avg_sq.sqrt()"), "denom")
    del denom


def _multi_tensor_adam(memory: Memory, parameters: Sequence[Parameter], dtype: DType) -> None:
    # Parameters of several dtypes are several groups. The name still holds one group's while the next one's are made.
    exp_avg_sq_sqrt = temporaries(memory, parameters, dtype, "exp_avg_sq_sqrt")
    del exp_avg_sq_sqrt
