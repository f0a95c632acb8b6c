"""LAMB (You et al. 2020, arXiv 1904.00962): deepspeed/ops/lamb/fused_lamb.py, FusedLamb, and csrc/lamb.

A kernel for each weight updates it in place. Its C++ makes partial sums of two norms and the weight's coefficient; the
coefficients stay until the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import DType, fp32
from memcalc.core.tensor import Memory, Tensor
from memcalc.optimizers.base import Optimizer, Parameter, State, like_parameter, one_by_one, streams, temporary

_SOURCE: Final = "deepspeed/ops/lamb/fused_lamb.py: FusedLamb.step"
_CUDA: Final = "csrc/lamb/fused_lamb_cuda.cpp: lamb"
_PARTIAL_SUMS: Final = 512


@dataclass(frozen=True, slots=True)
class FusedLamb(Optimizer):
    """DeepSpeed's FusedLamb."""

    only_engine: ClassVar[str | None] = "deepspeed"

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        out: list[State] = []
        for parameter in parameters:
            out += [like_parameter(name, parameter, dtype, _SOURCE) for name in ("exp_avg", "exp_avg_sq")]
            out.append(State("lamb_coeff", parameter, (), fp32, parameter.count, _CUDA))
        return out

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        """Play one step. The coefficients of the last one, which are states, are freed when it begins."""
        self.check(implementation)
        sums: Tensor | None = None
        for parameter in one_by_one(memory, parameters):
            of = parameter.shape, dtype
            sums = temporary(memory, (Dim("partial sums", 2 * _PARTIAL_SUMS),), fp32, "norms")
            streams(memory, "lamb", *[of] * 5, (parameter.shape, grad_dtype))
            streams(memory, "lamb: update", of, of, of)
            del sums


OPTIMIZER: Final = FusedLamb("lamb", ("fused",))
