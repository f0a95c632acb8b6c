"""AdaLomo of the lomo-optim package (0.1.1, lomo_optim/adalomo.py): LOMO with Adafactor's factored second moment.

A matrix has fp32 means of squares for its rows and its columns, and a vector one for each element. The update is made in fp32
and needs three tensors of the weight's size at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from memcalc.core.dims import Shape, numel
from memcalc.core.dtypes import DType, fp32
from memcalc.core.tensor import Memory
from memcalc.optimizers.base import Optimizer, Parameter, State, streams, within
from memcalc.optimizers.lomo import Block

SOURCE: Final = "lomo_optim/adalomo.py: AdaLomo"


@dataclass(frozen=True, slots=True)
class AdaLomo(Optimizer):
    """AdaLomo without clipping and weight decay."""

    needs_shapes: ClassVar[bool] = True
    takes_flat: ClassVar[bool] = False
    fuses_backward: ClassVar[bool] = True

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        states: list[State] = []
        for parameter in parameters:
            shape, count = parameter.shape, parameter.count
            if len(shape) == 1:
                states.append(State("exp_avg_sq", parameter, shape, fp32, count, SOURCE))
            else:
                states.append(State("exp_avg_sq_row", parameter, (shape[0],), fp32, count, SOURCE))
                states.append(State("exp_avg_sq_col", parameter, (shape[1],), fp32, count, SOURCE))
        return states

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        """Note the kernels of the updates, which are backward's: the step allocates nothing."""
        self.check(implementation)
        for parameter in parameters:
            with within(memory, parameter):
                _kernels(memory, parameter.shape, dtype, grad_dtype)

    def update(self, gradient: list[object], shape: Shape, dtype: DType, block: Block) -> None:
        """Play the update of one weight. `gradient` holds the gradient, which is taken out of it when it goes."""
        elements = numel(shape)[0]
        _grad = None
        if dtype is not fp32:
            _grad = block("gradient in fp32", elements, fp32)
            gradient.clear()
        squares = block("squares", elements, fp32)
        update = block("squares + eps", elements, fp32)
        del squares
        if len(shape) == 2:
            means = [dim.size for dim in shape]
            for size in means:
                block("mean of squares", size, fp32)
            row_mean = block("mean of the rows' means", 1, fp32)
            rows = block("r_factor", means[0], fp32)
            del row_mean
            columns = block("c_factor", means[1], fp32)
            update = block("update", elements, fp32)
            del rows, columns
        else:
            update = block("update", elements, fp32)
        _rms(block)
        _weight = None if dtype is fp32 else block("weight in fp32", elements, fp32)
        norm = block("norm of the weight", 1, fp32)
        _p_rms = block("p_rms", 1, fp32)
        del norm
        _rate = block("learning rate", 1, fp32)
        block("-learning rate", 1, fp32)
        del update, _grad, _weight, _p_rms, _rate


OPTIMIZER: Final = AdaLomo("adalomo", ("for-loop",))


def _rms(block: Block) -> None:
    norm = block("norm of the update", 1, fp32)
    rms = block("rms", 1, fp32)
    del norm
    _clipped = block("rms / clip_threshold", 1, fp32)
    del rms


def _kernels(memory: Memory, shape: Shape, dtype: DType, grad_dtype: DType) -> None:
    whole, own = (shape, fp32), (shape, dtype)
    if dtype is not fp32:
        streams(memory, "grad.to(fp32)", (shape, grad_dtype), whole)
        streams(memory, "p.to(fp32)", own, whole)
        streams(memory, "p.copy_", whole, own)
    for name in ("grad.div_", "grad**2", "squares + eps", "update.div_"):
        streams(memory, name, whole, whole)
    if len(shape) == 2:
        rows, columns = ((shape[0],), fp32), ((shape[1],), fp32)
        streams(memory, "mean of rows", whole, rows)
        streams(memory, "mean of columns", whole, columns)
        streams(memory, "r_factor * c_factor", rows, columns, whole)
        for name, of in (("row", rows), ("col", columns)):
            streams(memory, f"exp_avg_sq_{name}.mul_", of, of)
            streams(memory, f"exp_avg_sq_{name}.add_", of, of, of)
            streams(memory, f"{name} factor", of, of)
    else:
        streams(memory, "exp_avg_sq.mul_", whole, whole)
        streams(memory, "exp_avg_sq.add_", whole, whole, whole)
        streams(memory, "exp_avg_sq.rsqrt", whole, whole)
    streams(memory, "update.mul_", whole, whole, whole)
    streams(memory, "norm of the update", whole)
    streams(memory, "norm of the weight", whole)
    streams(memory, "p.add_", whole, whole, whole)
