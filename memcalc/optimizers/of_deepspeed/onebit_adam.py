"""1-bit Adam (Tang et al. 2021, arXiv 2102.02888): deepspeed/runtime/fp16/onebit/adam.py, OnebitAdam, of DeepSpeed 0.19.6.

In the warm-up it is Adam without bias correction. After `freeze_step` steps the second moment stays as it is, each rank adds its
own gradient to the first moment, and the ranks reduce that, compressed. DeepSpeed then reduces no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memcalc.core.dtypes import DType, fp32
from memcalc.core.tensor import Memory
from memcalc.optimizers.base import Parameter, State, like_parameter, one_by_one, streams
from memcalc.optimizers.of_deepspeed.compressed_allreduce import compressed_allreduce, of
from memcalc.optimizers.of_deepspeed.one_bit import OneBit, adams_update, applied

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor

_SOURCE: Final = "deepspeed/runtime/fp16/onebit/adam.py: OnebitAdam.step (0.19.6)"


@dataclass(frozen=True, slots=True)
class OnebitAdam(OneBit):
    """1-bit Adam."""

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        """Return the states. With several ranks the first moment is a part of the padded buffer that a reduction returned."""
        self.check(implementation)
        out: list[State] = []
        for parameter, first in self.made_in_first_step(parameters):
            sizes = self.sizes(parameter.shape)
            stored = of("padded", sizes.padded) if self.ranks > 1 and sizes.is_padded else parameter.shape
            out.append(State("exp_avg", parameter, stored, dtype, parameter.count, _SOURCE))
            out.append(like_parameter("exp_avg_sq", parameter, dtype, _SOURCE))
            out += self.errors(parameter, sizes, _SOURCE) if self.is_warm or first else []
        return out

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        self.check(implementation)
        update: Tensor | None = None
        for parameter in one_by_one(memory, parameters):
            moment, grad = (parameter.shape, fp32), (parameter.shape, grad_dtype)
            streams(memory, "exp_avg.mul_", moment, moment)
            streams(memory, "exp_avg.add_", moment, grad, moment)
            if not self.is_warm:
                streams(memory, "exp_avg_sq.mul_", moment, moment)
                streams(memory, "exp_avg_sq.addcmul_", moment, grad, moment)
            elif self.ranks > 1:
                compressed_allreduce(memory, self.sizes(parameter.shape))
            update = adams_update(memory, moment)
            applied(memory, update, moment)
        del update


OPTIMIZER: Final = OnebitAdam("onebit-adam", ("for-loop",))
