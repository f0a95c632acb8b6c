"""The parts that optimizers share whose moments of a matrix are of a lower rank: APOLLO and GaLore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.optimizers.base import Operand, streams

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.core.tensor import Memory


def is_tall(shape: Shape) -> bool:
    """Tell whether the second dim is the shorter side, which is projected."""
    return shape[0].size >= shape[1].size


def moments(memory: Memory, moment: Operand, grad: Operand) -> None:
    """Note the kernels of Adam's moments, up to the update."""
    streams(memory, "exp_avg.mul_", moment, moment)
    streams(memory, "exp_avg.add_", moment, grad, moment)
    streams(memory, "exp_avg_sq.mul_", moment, moment)
    streams(memory, "exp_avg_sq.addcmul_", moment, grad, moment)
    streams(memory, "exp_avg_sq.sqrt", moment, moment)
    streams(memory, "denom.add_", moment, moment)
    streams(memory, "norm_grad", moment, moment, moment)
