"""The optimizers of bitsandbytes: states of 8 or 32 bits, in the GPU's memory or paged (bitsandbytes/optim/optimizer.py).

The states of 32 bits are fp32 whatever the parameter's dtype is. A paged state is CUDA's managed memory: the driver moves its
pages between the host and the GPU. Each step brings the states of a parameter to the GPU before it updates it
(`prefetch_state`), and they stay there until the GPU needs the room. So all of them are counted as on the GPU: a setup that
fits has room for all of its pages, and one that does not fit may still run, with pages on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final

from memcalc.core.dims import Dim, Shape, numel
from memcalc.core.dtypes import DType, fp32, uint8
from memcalc.core.tensor import Memory
from memcalc.optimizers.base import Optimizer, Parameter, State, one_by_one, streams

PAGED: Final = "always; managed memory: on the GPU if there is room, else on the host"
"""The life of a paged state."""
PAGED_FROM: Final = 100_000
"""The elements from which on a paged optimizer pages a parameter's states (get_state_buffer)."""
_BLOCK_SIZE: Final = 256
_MIN_8BIT_SIZE: Final = 4096
_CODES: Final = Dim("codes", 256)


@dataclass(frozen=True, slots=True)
class BitsAndBytes(Optimizer):
    """An optimizer with one or two states of each parameter.

    In 8 bits a state has an fp32 maximum for each block of 256 elements, and a parameter with fewer than 4096 elements
    has fp32 states.
    """

    takes_stage_0: ClassVar[bool] = False
    shared: ClassVar[frozenset[str]] = frozenset({"qmap1", "qmap2"})

    moments: int
    """The number of states: Optimizer1State (Lion) or Optimizer2State (Adam)."""
    kept_in: DType
    """uint8 or fp32."""
    paged_from: int | None = None
    """The elements of a parameter from which on its states are paged; None: never."""

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        states: list[State] = []
        source = f"bitsandbytes/optim/optimizer.py: Optimizer{self.moments}State.init_state"
        numbers = range(1, self.moments + 1)
        has_maps = False
        for parameter in parameters:
            count, kept_in = parameter.count, self.dtype_of(parameter)
            if kept_in is uint8 and not has_maps:
                # The values of the 256 codes, signed and unsigned: `name2qmap`, shared by all parameters.
                states += [State(f"qmap{n}", parameter, (_CODES,), fp32, 1, source) for n in numbers]
                has_maps = True
            life = PAGED if self._pages(parameter) else "always"
            states += [State(f"state{n}", parameter, parameter.shape, kept_in, count, source, life) for n in numbers]
            if kept_in is uint8:
                blocks = _blocks(parameter.shape)
                states += [State(f"absmax{n}", parameter, blocks, fp32, count, source) for n in numbers]
        return states

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        # One CUDA kernel per tensor, which works in place: bitsandbytes/backends/cuda/ops.py.
        self.check(implementation)
        for parameter in one_by_one(memory, parameters):
            shape, kept_in = parameter.shape, self.dtype_of(parameter)
            weight, grad = (shape, dtype), (shape, grad_dtype)
            states = [(shape, kept_in)] * (2 * self.moments)
            if kept_in is fp32:
                streams(memory, "optimizer_update_32bit", weight, weight, grad, *states)
                continue
            scales = [(_blocks(shape), fp32)] * (2 * self.moments)
            codes = [((_CODES,), fp32)] * self.moments
            streams(memory, "optimizer_update_8bit_blockwise", weight, weight, grad, *states, *scales, *codes)

    def dtype_of(self, parameter: Parameter) -> DType:
        """Return the dtype of a parameter's states."""
        return fp32 if numel(parameter.shape)[0] < _MIN_8BIT_SIZE else self.kept_in

    def _pages(self, parameter: Parameter) -> bool:
        return self.paged_from is not None and numel(parameter.shape)[0] >= self.paged_from


@lru_cache(maxsize=1024)
def _blocks(shape: Shape) -> Shape:
    return (Dim("blocks", -(-numel(shape)[0] // _BLOCK_SIZE)),)
