"""Muon for the matrices inside the layers (torch/optim/_muon.py), AdamW for all other parameters.

torch's Muon takes 2-D parameters only. Embeddings, the head, norms and biases go to a second optimizer, which steps
after Muon. `implementation` is the second optimizer's: Muon itself has a for-loop only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    matrices_and_others,
    multiplies,
    one_by_one,
    streams,
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
    takes_flat: ClassVar[bool] = False

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        matrices, others = matrices_and_others(parameters)
        buffers = [like_parameter("momentum_buffer", p, dtype, _SOURCE) for p in matrices]
        return buffers + ADAMW.states(others, dtype, implementation)

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        self.check(implementation)
        matrices, others = matrices_and_others(parameters)
        _single_tensor_muon(memory, matrices, dtype, grad_dtype)
        ADAMW.step(memory, others, dtype, grad_dtype, implementation)


OPTIMIZER: Final = Muon("muon", ADAMW.implementations)


def _single_tensor_muon(memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType) -> None:
    update: Tensor | None = None
    for parameter in one_by_one(memory, parameters):
        of, grad = (parameter.shape, dtype), (parameter.shape, grad_dtype)
        streams(memory, "buf.lerp_", of, grad, of)
        # Nesterov is on by default: grad.lerp(buf) is a new tensor, made while `update` holds the last parameter's.
        update = temporary(memory, parameter.shape, wider(dtype, grad_dtype), "grad.lerp(buf)")
        streams(memory, "grad.lerp", grad, of, (update.shape, update.dtype))
        update = _zeropower_via_newtonschulz(update)
        streams(memory, "param.mul_", of, of)
        streams(memory, "param.add_", of, (parameter.shape, update.dtype), of)
    del update


def _zeropower_via_newtonschulz(grad: Tensor) -> Tensor:
    # grad.bfloat16() is the tensor itself if it is bf16 already; the caller holds `grad` until this returns.
    in_bf16 = grad.shape, bf16
    ortho_grad = grad if grad.dtype is bf16 else then(grad, "grad.bfloat16()", bf16)
    if ortho_grad is not grad:
        streams(grad.memory, "grad.bfloat16", (grad.shape, grad.dtype), in_bf16)
    streams(grad.memory, "ortho_grad.norm", in_bf16)
    streams(grad.memory, "ortho_grad.div_", in_bf16, in_bf16)
    rows, columns = grad.shape
    shape: Shape = (columns, rows) if rows.size > columns.size else (rows, columns)
    short, long = shape
    gram_shape: Shape = (short, short)
    # ortho_grad.norm().clamp(min=eps), two numbers
    then(temporary(grad.memory, (), bf16, "norm"), "clamped norm")
    gram_matrix: Tensor | None = None
    gram_update: Tensor | None = None
    for _ in range(_NS_STEPS):
        multiplies(grad.memory, "gram_matrix", short, short, long, bf16)
        multiplies(grad.memory, "gram_update", short, short, short, bf16)
        multiplies(grad.memory, "ortho_grad", short, long, short, bf16)
        gram_matrix = temporary(grad.memory, gram_shape, bf16, "gram_matrix")
        gram_update = temporary(grad.memory, gram_shape, bf16, "gram_update")
        ortho_grad = temporary(grad.memory, shape, bf16, "ortho_grad")
    del gram_matrix, gram_update
    return ortho_grad
