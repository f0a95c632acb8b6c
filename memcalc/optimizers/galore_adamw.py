"""GaLore for the matrices inside the layers, Adam as it is for all other parameters: galore_torch/adamw.py, AdamW.

The moments of a matrix are those of its gradient in a space of rank 128, spanned by singular vectors of its shorter side. The
rank and all else are transformers' defaults (trainer_optimizer.py, _get_galore_optimizer). The optimizer holds the vectors of
each matrix too, and decomposes the gradient anew every 200 steps. That step has the highest peak, so it is the one that is
played; the time is that of the other steps.

Of an fp32 gradient the vectors are a view of all that the decomposition has found: the whole square matrix is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from memcalc.core.dims import Dim, Shape
from memcalc.core.dtypes import DType, fp32, int32
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

_SOURCE: Final = "galore_torch/adamw.py: AdamW.step"
_PROJECTOR: Final = "galore_torch/galore_projector.py: GaLoreProjector"
_RANK: Final = 128


@dataclass(frozen=True, slots=True)
class GaLore(Optimizer):
    """GaLore with the projection "std"."""

    needs_shapes: ClassVar[bool] = True
    takes_flat: ClassVar[bool] = False
    takes_linear_layers_alone: ClassVar[bool] = True
    makes_states_in_turn: ClassVar[bool] = True

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        matrices, others = matrices_and_others(parameters)
        states: list[State] = []
        for parameter in others:
            states += [like_parameter(name, parameter, dtype, _SOURCE) for name in ("exp_avg", "exp_avg_sq")]
        for parameter in matrices:
            low, count = _low(parameter.shape), parameter.count
            kept = _vectors(parameter.shape) if dtype is fp32 else _projection(parameter.shape)
            states.append(State("ortho_matrix", parameter, kept, dtype, count, _PROJECTOR))
            states += [State(name, parameter, low, dtype, count, _SOURCE) for name in ("exp_avg", "exp_avg_sq")]
        return states

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        self.check(implementation)
        matrices, others = matrices_and_others(parameters)
        _steps(memory, others, matrices, dtype, grad_dtype)


OPTIMIZER: Final = GaLore("galore-adamw", ("for-loop",))


def _shorter(shape: Shape) -> Dim:
    return shape[1] if is_tall(shape) else shape[0]


def _rank(shape: Shape) -> Dim:
    """Return the rank of a projection: a small matrix has fewer vectors."""
    return Dim("rank", min(_RANK, _shorter(shape).size))


def _low(shape: Shape) -> Shape:
    """Return the shape of a projected gradient."""
    return (shape[0], _rank(shape)) if is_tall(shape) else (_rank(shape), shape[1])


def _projection(shape: Shape) -> Shape:
    return (_rank(shape), shape[1]) if is_tall(shape) else (shape[0], _rank(shape))


def _vectors(shape: Shape) -> Shape:
    """Return the shape of all singular vectors of the shorter side."""
    return (_shorter(shape), _shorter(shape))


def _steps(
    memory: Memory, others: Sequence[Parameter], matrices: Sequence[Parameter], dtype: DType, grad_dtype: DType
) -> None:
    """Run the loop over both groups. Its variables hold the tensors of the last parameter."""
    grad: Tensor | None = None
    denom: Tensor | None = None
    norm_grad: Tensor | None = None
    for parameter in one_by_one(memory, others):
        moment, given = (parameter.shape, dtype), (parameter.shape, grad_dtype)
        denom = temporary(memory, parameter.shape, dtype, "denom")
        norm_grad = then(denom, "norm_grad")
        moments(memory, moment, given)
        streams(memory, "param.add_", moment, moment, moment)
    for parameter in one_by_one(memory, matrices):
        shape = parameter.shape
        whole, low = (shape, grad_dtype), (_low(shape), grad_dtype)
        grad = None  # grad = p.grad
        _decomposes(memory, shape, grad_dtype)
        grad = temporary(memory, _low(shape), grad_dtype, "low_rank_grad")
        rows, columns = grad.shape
        multiplies(memory, "low_rank_grad", rows, columns, _shorter(shape), grad_dtype)
        moments(memory, low, low)
        denom = temporary(memory, grad.shape, grad_dtype, "denom")
        norm_grad = then(denom, "norm_grad")
        full = temporary(memory, shape, grad_dtype, "full_rank_grad")
        multiplies(memory, "full_rank_grad", shape[0], shape[1], _rank(shape), grad_dtype)
        norm_grad = then(full, "full_rank_grad · scale")
        streams(memory, "full_rank_grad.mul", whole, whole)
        del full
        streams(memory, "param.add_", (shape, dtype), whole, (shape, dtype))
    del grad, denom, norm_grad


def _decomposes(memory: Memory, shape: Shape, grad_dtype: DType) -> None:
    """Compute the projection anew, while the last one is there: `torch.linalg.svd` of the gradient in fp32. What cuSOLVER's
    kernel borrows while it runs is not known."""
    tall, rank, shorter = is_tall(shape), _rank(shape), _shorter(shape)
    matrix = None if grad_dtype is fp32 else temporary(memory, shape, fp32, "gradient in fp32")
    left = temporary(memory, (shape[0], shorter), fp32, "left singular vectors")
    values = temporary(memory, (shorter,), fp32, "singular values")
    right = temporary(memory, (shorter, shape[1]), fp32, "right singular vectors")
    info = temporary(memory, (), int32, "convergence")
    copy = temporary(memory, shape, fp32, "gradient by columns")  # which the decomposition writes over
    del copy, info
    diagonal = temporary(memory, (rank, rank), fp32, "diagonal of the singular values")
    scaled = (shape[0], rank) if tall else (rank, shape[1])
    unused = temporary(memory, scaled, fp32, "scaled singular vectors")
    del diagonal
    if grad_dtype is not fp32:
        temporary(memory, _projection(shape), grad_dtype, "ortho_matrix")
    del matrix, left, values, right, unused
