"""Muon for the matrices inside the layers (torch/optim/_muon.py), AdamW for all other parameters.

torch's Muon takes 2-D parameters only. Embeddings, the head, norms and biases go to a second optimizer, which steps
after Muon. `implementation` is the second optimizer's: Muon itself has a for-loop only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, Final

from memcalc.core.dims import Shape
from memcalc.core.dtypes import DType, bf16
from memcalc.core.tensor import Memory, Tensor
from memcalc.optimizers.adamw import OPTIMIZER as ADAMW
from memcalc.optimizers.base import (
    Optimizer,
    Parameter,
    State,
    like_parameter,
    one_by_one,
    temporary,
    then,
    wider,
)

_SOURCE: Final = "torch/optim/_muon.py: Muon._init_group"
_NS_STEPS: Final = 5


@dataclass(frozen=True, slots=True)
class Muon(Optimizer):
    """Muon, which keeps one buffer of every matrix, with AdamW's two moments of all other parameters."""

    needs_shapes: ClassVar[bool] = True

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        matrices, others = _split(parameters)
        buffers = [like_parameter("momentum_buffer", p, dtype, _SOURCE) for p in matrices]
        return buffers + ADAMW.states(others, dtype, implementation)

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        self.check(implementation)
        matrices, others = _split(parameters)
        _single_tensor_muon(memory, matrices, wider(dtype, grad_dtype))
        ADAMW.step(memory, others, dtype, grad_dtype, implementation)


OPTIMIZER: Final = Muon("muon", ADAMW.implementations)


def _split(parameters: Sequence[Parameter]) -> tuple[list[Parameter], list[Parameter]]:
    matrices: list[Parameter] = []
    others: list[Parameter] = []
    stacks = groupby(parameters, lambda parameter: parameter.count)
    for parameter in (replace(p, stack=i) for i, (_, stack) in enumerate(stacks) for p in stack):
        (matrices if parameter.is_matrix and len(parameter.shape) == 2 else others).append(parameter)
    return matrices, others


def _single_tensor_muon(memory: Memory, parameters: Sequence[Parameter], dtype: DType) -> None:
    update: Tensor | None = None
    for parameter in one_by_one(memory, parameters):
        # Nesterov is on by default: grad.lerp(buf) is a new tensor, made while `update` holds the last parameter's.
        update = temporary(memory, parameter.shape, dtype, "grad.lerp(buf)")
        update = _zeropower_via_newtonschulz(update)
    del update


def _zeropower_via_newtonschulz(grad: Tensor) -> Tensor:
    # grad.bfloat16() is the tensor itself if it is bf16 already; the caller holds `grad` until this returns.
    ortho_grad = grad if grad.dtype is bf16 else then(grad, "grad.bfloat16()", bf16)
    rows, columns = grad.shape
    shape: Shape = (columns, rows) if rows.size > columns.size else (rows, columns)
    gram_shape: Shape = (shape[0], shape[0])
    # ortho_grad.norm().clamp(min=eps), two numbers
    then(temporary(grad.memory, (), bf16, "norm"), "clamped norm")
    gram_matrix: Tensor | None = None
    gram_update: Tensor | None = None
    for _ in range(_NS_STEPS):
        gram_matrix = temporary(grad.memory, gram_shape, bf16, "gram_matrix")
        gram_update = temporary(grad.memory, gram_shape, bf16, "gram_update")
        ortho_grad = temporary(grad.memory, shape, bf16, "ortho_grad")
    del gram_matrix, gram_update
    return ortho_grad
