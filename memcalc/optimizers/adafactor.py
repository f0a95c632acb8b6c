"""Adafactor as in torch: torch/optim/_adafactor.py.

Adafactor keeps a row and a column of every matrix (over the last two dims of a tensor with more) and a full second
moment of every vector. Each norm of a whole tensor goes to the CPU at once, so only one such number is alive at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Final

from memcalc.core.dims import ONE_DIM, Dim, Shape
from memcalc.core.dtypes import DType, uint8
from memcalc.core.ops.reduction import reduction_scratch
from memcalc.core.tensor import Memory, Tensor
from memcalc.optimizers.base import (
    Optimizer,
    Parameter,
    State,
    like_parameter,
    one_by_one,
    streams,
    temporaries,
    temporary,
    within,
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
        _ops(memory, parameter, dtype, grad_dtype)
        if _is_multidim(parameter):
            row_mean = temporary(memory, _row(shape), grad_dtype, "row_mean")
            col_mean = temporary(memory, _column(shape), grad_dtype, "col_mean")
            _partial_sums(memory, shape, grad_dtype)
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
        for parameter in group:
            temporary(memory, (), dtype, "p.norm(2)")
            _ops_over_lists(memory, parameter, dtype, grad_dtype)
        if is_multidim:
            row_means = temporaries(memory, group, grad_dtype, "row_means", _row)
            del row_means
            col_means = temporaries(memory, group, grad_dtype, "col_means", _column)
            for parameter in group:
                _partial_sums(memory, parameter.shape, grad_dtype)
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


def _partial_sums(memory: Memory, shape: Shape, grad_dtype: DType) -> None:
    """Allocate and free what CUDA's norm over the rows of a gradient takes besides its result."""
    *stacks, rows, columns = (dim.size for dim in shape)
    nbytes = reduction_scratch(rows, columns, grad_dtype.itemsize, prod(stacks))
    if nbytes:
        temporary(memory, (Dim("partial sums", nbytes),), uint8, "col_mean: partial sums")


# --- kernels


def _ops(memory: Memory, parameter: Parameter, dtype: DType, grad_dtype: DType) -> None:
    """Note the kernels of one parameter's update. Weight decay is off by default."""
    of, grad = (parameter.shape, dtype), (parameter.shape, grad_dtype)
    streams(memory, "param.norm", of)
    if _is_multidim(parameter):
        for name, mean_of in (("row", _row), ("col", _column)):
            mean, var = (mean_of(parameter.shape), grad_dtype), (mean_of(parameter.shape), dtype)
            streams(memory, f"{name}_mean: norm", grad, mean)
            streams(memory, f"{name}_mean.square_", mean, mean)
            streams(memory, f"{name}_mean.div_", mean, mean)
            streams(memory, f"{name}_var.lerp_", var, mean, var)
        _estimates(memory, parameter, dtype)
        row_mean = _scalar(parameter.shape), dtype
        streams(memory, "row_var.mean().clamp_", row_mean, row_mean)
        streams(memory, "var_estimate.div_", of, row_mean, of)
    else:
        streams(memory, "grad_squared", grad, grad)
        streams(memory, "variance.lerp_", of, grad, of)
        streams(memory, "variance.clone", of, of)
    streams(memory, "var_estimate.clamp_", of, of)
    streams(memory, "update.rsqrt_", of, of)
    streams(memory, "update.mul_", of, grad, of)
    streams(memory, "update.norm", of)
    streams(memory, "param.add_", of, of, of)


def _estimates(memory: Memory, parameter: Parameter, dtype: DType) -> None:
    """Note the product of a column with a row, whose time is that of writing the result; and the mean of the rows."""
    row, column, of = _row(parameter.shape), _column(parameter.shape), parameter.shape
    streams(memory, "row_var @ col_var", (row, dtype), (column, dtype), (of, dtype))
    streams(memory, "row_var.mean", (row, dtype), (_scalar(of), dtype))


def _ops_over_lists(memory: Memory, parameter: Parameter, dtype: DType, grad_dtype: DType) -> None:
    """Note the same as kernels over all matrices or all vectors. Norms, products, means and clones are still kernels of one
    parameter."""
    of, grad = (parameter.shape, dtype), (parameter.shape, grad_dtype)
    group = "matrices" if _is_multidim(parameter) else "vectors"
    with within(memory, parameter):
        streams(memory, "p.norm", of)
    if _is_multidim(parameter):
        for name, mean_of in (("row", _row), ("col", _column)):
            mean, var = (mean_of(parameter.shape), grad_dtype), (mean_of(parameter.shape), dtype)
            with within(memory, parameter):
                streams(memory, f"{name}_means: norm", grad, mean)
            streams(memory, f"_foreach_mul_({name}_means)", mean, mean)
            streams(memory, f"_foreach_div_({name}_means)", mean, mean)
            streams(memory, f"_foreach_lerp_({name}_vars)", var, mean, var)
        row_mean = _scalar(parameter.shape), dtype
        with within(memory, parameter):
            _estimates(memory, parameter, dtype)
        streams(memory, "_foreach_clamp_min_(row_var_means)", row_mean, row_mean)
        streams(memory, "_foreach_div_(var_estimates)", of, row_mean, of)
    else:
        streams(memory, "_foreach_mul(grads)", grad, grad)
        streams(memory, "_foreach_lerp_(variances)", of, grad, of)
        with within(memory, parameter):
            streams(memory, "v.clone", of, of)
    streams(memory, f"_foreach_clamp_min_(var_estimates of {group})", of, of)
    streams(memory, f"_foreach_rsqrt_(var_estimates of {group})", of, of)
    streams(memory, f"_foreach_mul_(var_estimates of {group})", of, grad, of)
    with within(memory, parameter):
        streams(memory, "update.norm", of)
    streams(memory, f"_foreach_mul_(updates of {group})", of, of)
    streams(memory, f"_foreach_add_(params of {group})", of, of, of)
