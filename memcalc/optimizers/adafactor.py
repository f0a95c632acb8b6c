"""Adafactor as in torch: torch/optim/_adafactor.py.

Adafactor keeps a row and a column of every matrix (over the last two dims of a tensor with more) and a full second
moment of every vector. Each norm of a whole tensor goes to the CPU at once, so only one such number is alive at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from memcalc.core.dims import ONE_DIM, Shape
from memcalc.core.dtypes import DType
from memcalc.core.tensor import Memory, Tensor
from memcalc.optimizers.base import (
    Optimizer,
    Parameter,
    State,
    like_parameter,
    one_by_one,
    temporaries,
    temporary,
)

_SOURCE: Final = "torch/optim/_adafactor.py: Adafactor._init_group"


@dataclass(frozen=True, slots=True)
class Adafactor(Optimizer):
    """Adafactor with a factored second moment. Unlike torch's other optimizers it takes foreach only if told to."""

    needs_shapes: ClassVar[bool] = True

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        states: list[State] = []
        for parameter in parameters:
            if _is_multidim(parameter):
                row, column = _row(parameter.shape), _column(parameter.shape)
                states.append(State("row_var", parameter, row, dtype, parameter.count, _SOURCE))
                states.append(State("col_var", parameter, column, dtype, parameter.count, _SOURCE))
            else:
                states.append(like_parameter("variance", parameter, dtype, _SOURCE))
        return states

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        self.check(implementation)
        if implementation == "for-loop":
            _single_tensor_adafactor(memory, parameters, dtype, grad_dtype)
        else:
            _multi_tensor_adafactor(memory, parameters, dtype, grad_dtype)


OPTIMIZER: Final = Adafactor("adafactor", ("for-loop", "foreach"))


def _is_multidim(parameter: Parameter) -> bool:
    return len(parameter.shape) > 1


def _row(shape: Shape) -> Shape:
    """Return the shape that a reduction over the last dim leaves."""
    return (*shape[:-1], ONE_DIM)


def _column(shape: Shape) -> Shape:
    """Return the shape that a reduction over the last dim but one leaves."""
    return (*shape[:-2], ONE_DIM, shape[-1])


def _scalar(shape: Shape) -> Shape:
    """Return the shape that reductions over the last two dims leave."""
    return _row(_column(shape))


def _single_tensor_adafactor(memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType) -> None:
    row_mean: Tensor | None = None
    col_mean: Tensor | None = None
    grad_squared: Tensor | None = None
    var_estimate: Tensor | None = None
    update: Tensor | None = None
    for parameter in one_by_one(memory, parameters):
        shape = parameter.shape
        temporary(memory, (), dtype, "param.norm(2)")
        if _is_multidim(parameter):
            row_mean = temporary(memory, _row(shape), grad_dtype, "row_mean")
            col_mean = temporary(memory, _column(shape), grad_dtype, "col_mean")
            # `update` is the last parameter's var_estimate under another name, and still holds it.
            var_estimate = temporary(memory, shape, dtype, "var_estimate")
            temporary(memory, _scalar(shape), dtype, "row_var.mean()")
        else:
            grad_squared = temporary(memory, shape, grad_dtype, "grad_squared")
            var_estimate = temporary(memory, shape, dtype, "var_estimate")
        update = var_estimate
        temporary(memory, (), dtype, "update.norm(2)")
    del row_mean, col_mean, grad_squared, var_estimate, update


def _multi_tensor_adafactor(memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType) -> None:
    # Matrices and vectors are separate groups. The group of the first parameter comes first.
    grouped: dict[bool, list[Parameter]] = {}
    for parameter in parameters:
        grouped.setdefault(_is_multidim(parameter), []).append(parameter)
    var_estimates: list[Tensor] = []
    updates: list[Tensor] = []
    for is_multidim, group in grouped.items():
        for _ in group:
            temporary(memory, (), dtype, "p.norm(2)")
        if is_multidim:
            row_means = temporaries(memory, group, grad_dtype, "row_means", _row)
            del row_means
            col_means = temporaries(memory, group, grad_dtype, "col_means", _column)
            del col_means
            # `updates` still holds the other group's tensors until it is bound again below.
            var_estimates = temporaries(memory, group, dtype, "var_estimates")
            row_var_means = temporaries(memory, group, dtype, "row_var_means", _scalar)
            del row_var_means
        else:
            grads_squared = temporaries(memory, group, grad_dtype, "grads_squared")
            del grads_squared
            var_estimates = temporaries(memory, group, dtype, "var_estimates")
        updates = var_estimates
        for _ in group:
            temporary(memory, (), dtype, "update.norm(2)")
    del var_estimates, updates
