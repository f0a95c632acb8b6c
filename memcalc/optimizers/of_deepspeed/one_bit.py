"""The parts of DeepSpeed's 1-bit optimizers that all three have: their place in a run, and Adam's update op by op."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dims import Shape, numel
from memcalc.core.dtypes import fp32
from memcalc.optimizers.base import Operand, Optimizer, Parameter, State, streams, temporary, then
from memcalc.optimizers.of_deepspeed.compressed_allreduce import Compressed, of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.tensor import Memory, Tensor

WARMUP: Final = "warmup"


@dataclass(frozen=True, slots=True)
class OneBit(Optimizer):
    """An optimizer that sends signs after a warm-up, in a run of `ranks` ranks."""

    compresses: ClassVar[bool] = True
    only_engine: ClassVar[str | None] = "deepspeed"
    needs_shapes: ClassVar[bool] = True

    ranks: int = 1
    phase: str = "compressed"

    def among(self, ranks: int, phase: str | None) -> Optimizer:
        return replace(self, ranks=ranks, phase=phase or self.phase)

    @property
    def is_warm(self) -> bool:
        """Tell whether the warm-up is over."""
        return self.phase != WARMUP

    def sizes(self, shape: Shape) -> Compressed:
        """Return the sizes of a tensor of this shape that is compressed."""
        return Compressed(numel(shape)[0], self.ranks)

    def made_in_first_step(self, parameters: Sequence[Parameter]) -> list[tuple[Parameter, bool]]:
        """Return the parameters, each with True if it keeps what the very first step made: all but the last one do, whose
        errors that step takes away again."""
        *rest, last = parameters
        out = [(parameter, True) for parameter in rest]
        if last.count > 1:
            out.append((replace(last, count=last.count - 1), True))
        return [*out, (replace(last, count=1), False)]

    def errors(self, parameter: Parameter, sizes: Compressed, source: str) -> list[State]:
        """Return the errors of both phases of a compressed all-reduce."""
        count = parameter.count
        return [
            State("worker_error", parameter, of("padded", sizes.padded), fp32, count, source),
            State("server_error", parameter, of("padded/dp", sizes.chunk), fp32, count, source),
        ]


def adams_update(memory: Memory, moment: Operand) -> Tensor:
    """Return exp_avg / (exp_avg_sq.sqrt() + eps)."""
    shape, dtype = moment
    denominator = _denominator(memory, shape)
    streams(memory, "exp_avg_sq.sqrt", moment, moment)
    streams(memory, "add eps", moment, moment)
    update = then(denominator, "update")
    streams(memory, "update", moment, moment, (shape, dtype))
    return update


def denominator(memory: Memory, moment: Operand) -> Tensor:
    """Return exp_avg_sq.sqrt() + eps."""
    streams(memory, "exp_avg_sq.sqrt", moment, moment)
    streams(memory, "add eps", moment, moment)
    return _denominator(memory, moment[0])


def _denominator(memory: Memory, shape: Shape) -> Tensor:
    return then(temporary(memory, shape, fp32, "exp_avg_sq.sqrt()"), "denom")


def applied(memory: Memory, update: Tensor, weight: Operand) -> None:
    """Add the update times the learning rate to the weight."""
    then(update, "lr · update")
    streams(memory, "lr · update", weight, weight)
    streams(memory, "param.add_", weight, weight, weight)
