"""SGD without and with momentum: torch/optim/sgd.py.

Every op of a step is in place (weight decay, dampening and nesterov are off by default), so a step has no temporaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from memcalc.core.dtypes import DType
from memcalc.core.tensor import Memory
from memcalc.optimizers.base import Optimizer, Parameter, State, like_parameter


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


OPTIMIZER: Final = Sgd("sgd", ("foreach", "fused", "for-loop"), momentum=False)
