"""1-bit LAMB (Li et al. 2021, arXiv 2104.06069): deepspeed/runtime/fp16/onebit/lamb.py, OnebitLamb, of DeepSpeed 0.19.6.

All first moments are views of one flat buffer. After `freeze_step` steps that buffer is reduced as a whole, compressed; a fresh
second moment, made of gradients that are read back from the first one, scales the layers' steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import DType, fp32
from memcalc.core.tensor import Memory
from memcalc.optimizers.base import (
    Operand,
    Parameter,
    State,
    like_parameter,
    one_by_one,
    streams,
    temporaries,
    temporary,
    then,
)
from memcalc.optimizers.of_deepspeed.compressed_allreduce import Compressed, compressed_allreduce, of
from memcalc.optimizers.of_deepspeed.one_bit import OneBit, adams_update, applied, denominator

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor

_SOURCE: Final = "deepspeed/runtime/fp16/onebit/lamb.py: OnebitLamb.step (0.19.6)"


@dataclass(frozen=True, slots=True)
class OnebitLamb(OneBit):
    """1-bit LAMB."""

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        """Return the states. The errors are there in the warm-up too."""
        self.check(implementation)
        own = ("exp_avg_sq", "exp_avg_sq_fresh")
        out = [like_parameter(name, parameter, dtype, _SOURCE) for parameter in parameters for name in own]
        sizes = self.of_all(parameters)
        flat = Parameter("all weights", (Dim("parameters", sizes.elements),), 1, False)
        moments = State("exp_avg", flat, of("padded", sizes.padded), dtype, 1, _SOURCE)
        return [*out, moments, *self.errors(flat, sizes, _SOURCE)]

    def of_all(self, parameters: Sequence[Parameter]) -> Compressed:
        """Return the sizes of the flat buffer."""
        return Compressed(sum(one.count * numel(one.shape)[0] for one in parameters), self.ranks)

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        self.check(implementation)
        if self.is_warm:
            self._compressed(memory, parameters, grad_dtype)
        else:
            self._warmup(memory, parameters, grad_dtype)

    def _warmup(self, memory: Memory, parameters: Sequence[Parameter], grad_dtype: DType) -> None:
        update: Tensor | None = None
        weight_norm: Tensor | None = None
        update_norm: Tensor | None = None
        for parameter in one_by_one(memory, parameters):
            moment, grad = (parameter.shape, fp32), (parameter.shape, grad_dtype)
            streams(memory, "exp_avg.mul_", moment, moment)
            streams(memory, "exp_avg.add_", moment, grad, moment)
            streams(memory, "exp_avg_sq.mul_", moment, moment)
            streams(memory, "exp_avg_sq.addcmul_", moment, grad, moment)
            weight_norm = _norm(memory, moment)
            update = adams_update(memory, moment)
            update_norm = _norm(memory, moment)
            then(weight_norm, "lamb_coeff")
            applied(memory, update, moment)
        del update, weight_norm, update_norm

    def _compressed(self, memory: Memory, parameters: Sequence[Parameter], grad_dtype: DType) -> None:
        last_step = temporaries(memory, parameters, fp32, "exp_avg of the last step")
        for parameter in one_by_one(memory, parameters):
            moment, grad = (parameter.shape, fp32), (parameter.shape, grad_dtype)
            streams(memory, "exp_avg.clone", moment, moment)
            streams(memory, "exp_avg.mul_", moment, moment, moment, moment)
            streams(memory, "exp_avg.add_", moment, grad, moment)
        if self.ranks > 1:
            sizes = self.of_all(parameters)
            compressed_allreduce(memory, Compressed(sizes.padded, self.ranks))  # the flat buffer has the padding
        self._updates(memory, parameters)
        del last_step

    def _updates(self, memory: Memory, parameters: Sequence[Parameter]) -> None:
        """Update the weights. The loop's variables hold the tensors of the last weight."""
        gradient: Tensor | None = None
        denom: Tensor | None = None
        update: Tensor | None = None
        norm: Tensor | None = None
        real: Tensor | None = None
        for parameter in one_by_one(memory, parameters):
            moment = parameter.shape, fp32
            streams(memory, "exp_avg.div_", moment, moment)
            gradient = _read_back(memory, moment)
            streams(memory, "exp_avg_sq_fresh.mul_", moment, moment)
            streams(memory, "exp_avg_sq_fresh.addcmul_", moment, moment, moment)
            denom = denominator(memory, moment)
            update = then(denom, "update")
            streams(memory, "update", moment, moment, moment)
            norm = _norm(memory, moment)
            real = denominator(memory, moment)
            _factor(memory, moment)
            applied(memory, update, moment)
        del gradient, denom, update, norm, real


OPTIMIZER: Final = OnebitLamb("onebit-lamb", ("for-loop",))


def _norm(memory: Memory, of_tensor: Operand) -> Tensor:
    """Return tensor.pow(2).sum().sqrt()."""
    squares = temporary(memory, of_tensor[0], fp32, "pow(2)")
    total = temporary(memory, (), fp32, "sum")
    del squares
    streams(memory, "pow", of_tensor, of_tensor)
    streams(memory, "sum", of_tensor)
    return then(total, "norm")


def _factor(memory: Memory, moment: Operand) -> None:
    """Compute (denom / denom_real).max()."""
    ratio = temporary(memory, moment[0], fp32, "denom / denom_real")
    streams(memory, "factor", moment, moment, moment, moment)
    temporary(memory, (), fp32, "factor")
    del ratio


def _read_back(memory: Memory, moment: Operand) -> Tensor:
    """Return (exp_avg - last_step · beta1) / (1 - beta1)."""
    scaled = temporary(memory, moment[0], fp32, "last step · beta1")
    difference = then(scaled, "exp_avg - last step · beta1")
    del scaled
    streams(memory, "gradient", *[moment] * 7)
    return then(difference, "grad_reconstruct")
