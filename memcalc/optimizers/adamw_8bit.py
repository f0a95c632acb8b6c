"""AdamW with 8-bit states as in bitsandbytes: bitsandbytes/optim/optimizer.py, Optimizer2State."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from memcalc.core.dims import Dim, Shape, numel
from memcalc.core.dtypes import DType, fp32, uint8
from memcalc.core.tensor import Memory
from memcalc.optimizers.base import Optimizer, Parameter, State, like_parameter

_SOURCE: Final = "bitsandbytes/optim/optimizer.py: Optimizer2State.init_state"
_BLOCK_SIZE: Final = 256
_MIN_8BIT_SIZE: Final = 4096
_CODES: Final = Dim("codes", 256)


@dataclass(frozen=True, slots=True)
class AdamW8bit(Optimizer):
    """AdamW with two one-byte moments, and an fp32 maximum per block of 256. Small tensors keep two fp32 moments."""

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        states: list[State] = []
        has_maps = False
        for parameter in parameters:
            if numel(parameter.shape)[0] < _MIN_8BIT_SIZE:
                states.append(like_parameter("state1", parameter, fp32, _SOURCE))
                states.append(like_parameter("state2", parameter, fp32, _SOURCE))
                continue
            if not has_maps:
                # The values of the 256 codes, signed and unsigned: `name2qmap`, one pair for all parameters.
                states.append(State("qmap1", parameter, (_CODES,), fp32, 1, _SOURCE))
                states.append(State("qmap2", parameter, (_CODES,), fp32, 1, _SOURCE))
                has_maps = True
            blocks = _blocks(parameter.shape)
            states.append(like_parameter("state1", parameter, uint8, _SOURCE))
            states.append(like_parameter("state2", parameter, uint8, _SOURCE))
            states.append(State("absmax1", parameter, blocks, fp32, parameter.count, _SOURCE))
            states.append(State("absmax2", parameter, blocks, fp32, parameter.count, _SOURCE))
        return states

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        # One CUDA kernel per tensor, which works in place: bitsandbytes/backends/cuda/ops.py.
        self.check(implementation)


OPTIMIZER: Final = AdamW8bit("adamw-8bit", ("fused",))


@lru_cache(maxsize=1024)
def _blocks(shape: Shape) -> Shape:
    return (Dim("blocks", -(-numel(shape)[0] // _BLOCK_SIZE)),)
