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
    Operand,
    Optimizer,
    Parameter,
    State,
    like_parameter,
    one_by_one,
    streams,
    temporaries,
    temporary,
    then,
)

_SOURCE: Final = "torch/optim/adam.py: Adam._init_group"


@dataclass(frozen=True, slots=True)
class Adam(Optimizer):
    """Adam, which keeps two moments of every parameter."""

    elementwise: ClassVar[bool] = True

    decays: bool = False
    """True if weight decay is on by default."""

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
            self._single_tensor_adam(memory, parameters, dtype, grad_dtype)
        elif implementation == "foreach":
            self._multi_tensor_adam(memory, parameters, dtype, grad_dtype)
        else:
            _fused_adam(memory, parameters, dtype, grad_dtype)

    def _single_tensor_adam(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType
    ) -> None:
        denom: Tensor | None = None
        for parameter in one_by_one(memory, parameters):
            own = parameter.dtype or dtype
            self._ops(memory, (parameter.shape, own), (parameter.shape, parameter.dtype or grad_dtype))
            # (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps), while `denom` still holds the last parameter's
            denom = then(temporary(memory, parameter.shape, own, "exp_avg_sq.sqrt()"), "denom")
        del denom

    def _multi_tensor_adam(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType
    ) -> None:
        for parameter in parameters:
            own = parameter.dtype
            self._ops(memory, (parameter.shape, own or dtype), (parameter.shape, own or grad_dtype))
        # Parameters of several dtypes are several groups. The name still holds one group's while the next one's are made.
        exp_avg_sq_sqrt = temporaries(memory, parameters, dtype, "exp_avg_sq_sqrt")
        del exp_avg_sq_sqrt

    def _ops(self, memory: Memory, of: Operand, grad: Operand) -> None:
        """Note the kernels of an update op by op. `of` is the shape and dtype of the parameter and of its moments."""
        if self.decays:
            streams(memory, "param.mul_", of, of)
        streams(memory, "exp_avg.lerp_", of, grad, of)
        streams(memory, "exp_avg_sq.mul_", of, of)
        streams(memory, "exp_avg_sq.addcmul_", of, grad, of)
        streams(memory, "exp_avg_sq.sqrt", of, of)
        streams(memory, "denom.div_", of, of)
        streams(memory, "denom.add_", of, of)
        streams(memory, "param.addcdiv_", of, of, of, of)


OPTIMIZER: Final = Adam("adamw", ("foreach", "fused", "for-loop"), decays=True)


def _fused_adam(memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType) -> None:
    """Note one kernel, which updates in place: it reads and writes the parameter and its moments, and reads the
    gradient."""
    for parameter in parameters:
        of = parameter.shape, parameter.dtype or dtype
        streams(memory, "_fused_adamw_", *[of] * 6, (parameter.shape, parameter.dtype or grad_dtype))
