"""Lion as in the lion-pytorch package: lion_pytorch/lion_pytorch.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from memcalc.core.dtypes import DType
from memcalc.core.tensor import Memory
from memcalc.optimizers.base import (
    Optimizer,
    Parameter,
    State,
    like_parameter,
    one_by_one,
    streams,
    temporary,
    then,
    wider,
)


@dataclass(frozen=True, slots=True)
class Lion(Optimizer):
    """Lion, which keeps one moment of every parameter."""

    elementwise: ClassVar[bool] = True
    makes_states_in_turn: ClassVar[bool] = True

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        return [like_parameter("exp_avg", p, dtype, "lion_pytorch/lion_pytorch.py: Lion.step") for p in parameters]

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        self.check(implementation)
        for parameter in one_by_one(memory, parameters):
            _update_fn(memory, parameter, dtype, grad_dtype)


OPTIMIZER: Final = Lion("lion", ("for-loop",))


def _update_fn(memory: Memory, parameter: Parameter, dtype: DType, grad_dtype: DType) -> None:
    of, grad, update_of = (
        (parameter.shape, dtype),
        (parameter.shape, grad_dtype),
        (parameter.shape, wider(dtype, grad_dtype)),
    )
    streams(memory, "param.mul_", of, of)
    streams(memory, "exp_avg.clone", of, of)
    streams(memory, "clone.mul_", of, of)
    streams(memory, "update.add", of, grad, update_of)
    streams(memory, "update.sgn_", update_of, update_of)
    streams(memory, "param.add_", of, update_of, of)
    streams(memory, "exp_avg.mul_", of, of)
    streams(memory, "exp_avg.add_", of, grad, of)
    # exp_avg.clone().mul_(beta1).add(grad).sgn_(): `add` is not in place. As a separate function it holds nothing while
    # the next parameter is updated.
    update = then(temporary(memory, parameter.shape, dtype, "exp_avg.clone()"), "update", wider(dtype, grad_dtype))
    del update
