"""SGD without and with momentum: torch/optim/sgd.py.

Every op of a step is in place (weight decay, dampening and nesterov are off by default), so a step has no temporaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from memcalc.core.dtypes import DType
from memcalc.core.tensor import Memory
from memcalc.optimizers.base import Operand, Optimizer, Parameter, State, like_parameter, one_by_one, streams


@dataclass(frozen=True, slots=True)
class Sgd(Optimizer):
    """SGD, which keeps one buffer of every parameter with momentum, and nothing without."""

    elementwise: ClassVar[bool] = True

    momentum: bool

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        if not self.momentum:
            return []
        # The first step makes the buffer as a clone of the gradient.
        return [like_parameter("momentum_buffer", p, dtype, "torch/optim/sgd.py: SGD.step") for p in parameters]

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        self.check(implementation)
        for parameter in one_by_one(memory, parameters) if implementation == "for-loop" else parameters:
            of, grad = (parameter.shape, dtype), (parameter.shape, grad_dtype)
            if implementation == "fused":
                streams(memory, "_fused_sgd_", *[of] * (4 if self.momentum else 2), grad)
            else:
                self._ops(memory, of, grad)

    def _ops(self, memory: Memory, of: Operand, grad: Operand) -> None:
        """Note the kernels of an update op by op."""
        if self.momentum:
            streams(memory, "momentum_buffer.mul_", of, of)
            streams(memory, "momentum_buffer.add_", of, grad, of)
        streams(memory, "param.add_", of, of if self.momentum else grad, of)


OPTIMIZER: Final = Sgd("sgd", ("foreach", "fused", "for-loop"), momentum=False)
