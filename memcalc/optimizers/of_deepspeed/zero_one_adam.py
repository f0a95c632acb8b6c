"""0/1 Adam (Lu et al. 2022, arXiv 2202.06009): deepspeed/runtime/fp16/onebit/zoadam.py, ZeroOneAdam, of DeepSpeed 0.19.6.

The second moment is updated in fewer and fewer steps, from gradients that are all-reduced whole; in the steps between them
gradients are reduced compressed. After `var_freeze_step` steps it stays as it is, and ranks step by themselves; the sum of
their updates is reduced, compressed: at first in every step, later in one of `local_step_interval`. The steps here are one of
the first kind (the warm-up) and one that reduces updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memcalc.core.dtypes import DType, fp32
from memcalc.core.tensor import Memory
from memcalc.optimizers.base import Operand, Parameter, State, like_parameter, one_by_one, streams, temporary, then
from memcalc.optimizers.of_deepspeed.compressed_allreduce import compressed_allreduce, of
from memcalc.optimizers.of_deepspeed.one_bit import OneBit, adams_update, applied, denominator

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor

_SOURCE: Final = "deepspeed/runtime/fp16/onebit/zoadam.py: ZeroOneAdam.step (0.19.6)"


@dataclass(frozen=True, slots=True)
class ZeroOneAdam(OneBit):
    """0/1 Adam."""

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        out: list[State] = []
        for parameter, first in self.made_in_first_step(parameters):
            sizes = self.sizes(parameter.shape)
            reduced = first and self.ranks > 1 and sizes.is_padded
            sums = of("padded", sizes.padded) if reduced else parameter.shape
            out += [like_parameter(name, parameter, dtype, _SOURCE) for name in ("exp_avg", "exp_avg_sq")]
            out.append(State("momentum_accumulator", parameter, sums, dtype, parameter.count, _SOURCE))
            out += self.errors(parameter, sizes, _SOURCE)
        return out

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        self.check(implementation)
        update: Tensor | None = None
        for parameter in one_by_one(memory, parameters):
            moment, grad = (parameter.shape, fp32), (parameter.shape, grad_dtype)
            if not self.is_warm:
                streams(memory, "exp_avg_sq.mul_", moment, moment)
                streams(memory, "exp_avg_sq.addcmul_", moment, grad, moment)
            streams(memory, "exp_avg.mul_", moment, moment)
            streams(memory, "exp_avg.add_", moment, grad, moment)
            update = adams_update(memory, moment)
            applied(memory, update, moment)
            if self.is_warm:
                applied(memory, update, moment)
                self._synchronizes(memory, moment)
        del update

    def _synchronizes(self, memory: Memory, moment: Operand) -> None:
        """Take the rank's own updates back, and add the average of all ranks'."""
        temporary(memory, moment[0], fp32, "-comm_buffer")
        streams(memory, "-comm_buffer", moment, moment)
        streams(memory, "param.add_", moment, moment, moment)
        denominator(memory, moment)
        streams(memory, "comm_buffer.mul_", moment, moment, moment)
        if self.ranks > 1:
            compressed_allreduce(memory, self.sizes(moment[0]))
            streams(memory, "comm_buffer.copy_", moment, moment)
        temporary(memory, moment[0], fp32, "comm_buffer / lrs")
        streams(memory, "exp_avg", moment, moment, moment, moment, moment, moment)
        then(denominator(memory, moment), "comm_buffer / denom")
        streams(memory, "comm_buffer / denom", moment, moment, moment)
        streams(memory, "param.add_", moment, moment, moment)
        streams(memory, "comm_buffer.zero_", moment)


OPTIMIZER: Final = ZeroOneAdam("zero-one-adam", ("for-loop",))
