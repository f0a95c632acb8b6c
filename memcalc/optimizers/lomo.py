"""LOMO of the lomo-optim package (0.1.1, lomo_optim/lomo.py): plain gradient descent within backward.

A hook of each gradient updates the weights whose gradients are there already, which is the one before, and frees these. No more
than two gradients are there at once, and the step has nothing to do. The update is made in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from memcalc.core.dims import Shape, numel
from memcalc.core.dtypes import DType, fp32
from memcalc.core.tensor import Memory
from memcalc.optimizers.base import Optimizer, Parameter, State, streams, within

Block = Callable[[str, int, DType], object]
"""Allocates a temporary of so many elements."""


@dataclass(frozen=True, slots=True)
class Lomo(Optimizer):
    """LOMO without clipping."""

    takes_flat: ClassVar[bool] = False
    fuses_backward: ClassVar[bool] = True

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        return []

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        """Note the kernels of the updates, which are backward's: the step allocates nothing."""
        self.check(implementation)
        for parameter in parameters:
            with within(memory, parameter):
                shape = parameter.shape
                whole, own = (shape, fp32), (shape, dtype)
                if dtype is not fp32:
                    streams(memory, "grad.to(fp32)", (shape, grad_dtype), whole)
                    streams(memory, "p.to(fp32)", own, whole)
                    streams(memory, "p.copy_", whole, own)
                streams(memory, "p.add_", whole, whole, whole)

    def update(self, gradient: list[object], shape: Shape, dtype: DType, block: Block) -> None:
        """Play the update of one weight. `gradient` holds the gradient, which is taken out of it when it goes."""
        if dtype is fp32:
            return
        elements = numel(shape)[0]
        _grad = block("gradient in fp32", elements, fp32)
        gradient.clear()
        _weight = block("weight in fp32", elements, fp32)


OPTIMIZER: Final = Lomo("lomo", ("for-loop",))
