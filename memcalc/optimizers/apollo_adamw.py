"""APOLLO for the matrices inside the layers, Adam as it is for all other parameters: apollo_torch/apollo.py, APOLLOAdamW.

The moments of a matrix are those of its gradient in a space of rank 128, a random projection of its shorter side. The rank and
all else are transformers' defaults (trainer_optimizer.py, _get_apollo_optimizer). The optimizer holds the projection of each
matrix too, and draws it anew every 200 steps. That step has the highest peak, so it is the one that is played; the time is that
of the other steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from memcalc.core.dims import Dim, Shape
from memcalc.core.dtypes import DType, fp32
from memcalc.core.tensor import Memory, Tensor
from memcalc.optimizers.base import (
    Optimizer,
    Parameter,
    State,
    like_parameter,
    matrices_and_others,
    multiplies,
    one_by_one,
    streams,
    temporary,
    then,
)
from memcalc.optimizers.low_rank import is_tall, moments

_SOURCE: Final = "apollo_torch/apollo.py: APOLLOAdamW.step"
_PROJECTOR: Final = "apollo_torch/random_projector.py: GradientProjector"
_RANK: Final = Dim("rank", 128)


@dataclass(frozen=True, slots=True)
class Apollo(Optimizer):
    """APOLLO with a random projection ("std") and a factor for each channel."""

    needs_shapes: ClassVar[bool] = True
    takes_flat: ClassVar[bool] = False
    takes_linear_layers_alone: ClassVar[bool] = True

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        matrices, others = matrices_and_others(parameters)
        states: list[State] = []
        for parameter in others:
            states += [like_parameter(name, parameter, dtype, _SOURCE) for name in ("exp_avg", "exp_avg_sq")]
        for parameter in matrices:
            low, count = _low(parameter.shape), parameter.count
            states.append(State("ortho_matrix", parameter, _projection(parameter.shape), dtype, count, _PROJECTOR))
            states += [State(name, parameter, low, dtype, count, _SOURCE) for name in ("exp_avg", "exp_avg_sq")]
            states.append(State("scaled_grad", parameter, (), dtype, count, _SOURCE))
        return states

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        self.check(implementation)
        matrices, others = matrices_and_others(parameters)
        _steps(memory, others, matrices, dtype, grad_dtype)


OPTIMIZER: Final = Apollo("apollo-adamw", ("for-loop",))


def _low(shape: Shape) -> Shape:
    """Return the shape of a projected gradient."""
    return (shape[0], _RANK) if is_tall(shape) else (_RANK, shape[1])


def _projection(shape: Shape) -> Shape:
    return (_RANK, shape[1]) if is_tall(shape) else (shape[0], _RANK)


def _channels(shape: Shape) -> Shape:
    """Return the shape of a norm over the low-rank dim."""
    return (shape[0],) if is_tall(shape) else (shape[1],)


def _steps(
    memory: Memory, others: Sequence[Parameter], matrices: Sequence[Parameter], dtype: DType, grad_dtype: DType
) -> None:
    """Run the loop over both groups. Its variables hold the tensors of the last parameter."""
    grad: Tensor | None = None
    denom: Tensor | None = None
    norm_grad: Tensor | None = None
    scaled_grad: Tensor | None = None
    factor: Tensor | None = None
    number: Tensor | None = None
    for parameter in one_by_one(memory, others):
        moment, given = (parameter.shape, dtype), (parameter.shape, grad_dtype)
        denom = temporary(memory, parameter.shape, dtype, "denom")
        norm_grad = then(denom, "norm_grad")
        moments(memory, moment, given)
        streams(memory, "param.add_", moment, moment, moment)
    for parameter in one_by_one(memory, matrices):
        shape = parameter.shape
        whole, low, channels = (shape, grad_dtype), (_low(shape), grad_dtype), (_channels(shape), grad_dtype)
        grad = None  # grad = p.grad
        _draws(memory, shape, grad_dtype)
        grad = temporary(memory, _low(shape), grad_dtype, "low_rank_grad")
        rows, columns = grad.shape
        multiplies(memory, "low_rank_grad", rows, columns, shape[1] if is_tall(shape) else shape[0], grad_dtype)
        moments(memory, low, low)
        denom = temporary(memory, grad.shape, grad_dtype, "denom")
        norm_grad = then(denom, "norm_grad")
        above = temporary(memory, channels[0], grad_dtype, "norm of norm_grad")
        below = then(temporary(memory, channels[0], grad_dtype, "norm of grad"), "norm of grad + 1e-8")
        factor = then(above, "grad_scaling_factor")
        del above, below
        streams(memory, "norm(norm_grad)", low, channels)
        streams(memory, "norm(grad)", low, channels)
        streams(memory, "norm.add", channels, channels)
        streams(memory, "grad_scaling_factor", channels, channels, channels)
        scaled_grad = temporary(memory, shape, grad_dtype, "scaled_grad")
        streams(memory, "scaled_grad", whole, channels, whole)
        number = temporary(memory, (), grad_dtype, "scaled_grad_norm")
        streams(memory, "norm(scaled_grad)", whole)
        temporary(memory, (), grad_dtype, "state + 1e-8")
        scaled_grad = then(scaled_grad, "scaled_grad / limiter")
        streams(memory, "scaled_grad.div", whole, whole)
        norm_grad = scaled_grad
        streams(memory, "norm_grad.mul_", whole, whole)
        streams(memory, "param.add_", (shape, dtype), whole, (shape, dtype))
    del grad, denom, norm_grad, scaled_grad, factor, number


def _draws(memory: Memory, shape: Shape, grad_dtype: DType) -> None:
    """Draw a projection, while the last one is there: in fp32, from an fp32 copy of the gradient's shape."""
    matrix = None if grad_dtype is fp32 else temporary(memory, shape, fp32, "gradient in fp32, for its shape")
    drawn = temporary(memory, _projection(shape), fp32, "randn")
    drawn = then(drawn, "randn / sqrt(rank)")
    if grad_dtype is not fp32:
        then(drawn, "ortho_matrix", grad_dtype)
    del matrix, drawn
