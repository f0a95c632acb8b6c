"""The scales of DeepSpeed's CUDA quantiser: one fp32 number for each group of weights.

Sources: deepspeed/runtime/zero/partition_parameters.py (CUDAQuantizer), csrc/quantization/pt_binding.cpp, which is C++: what its
functions return was read there.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from typing import Final

from memcalc.inputs.options import refuse

SOURCE: Final = "deepspeed/runtime/zero/partition_parameters.py, csrc/quantization/pt_binding.cpp"

_MOST: Final = 8000
"""The elements that a group may have (CUDAQuantizer.target_group_size)."""
_UNIT: Final = 8
"""The elements of a group are a multiple of it."""


@lru_cache(maxsize=65536)
def scales_of(elements: int) -> int:
    """Return the groups that a rank's `elements` weights are quantised in: the fewest of equal size, a multiple of 8 up to 8000
    (CUDAQuantizer.quantize). Raises InputError for a number that is no multiple of 8, which DeepSpeed's assertion refuses."""
    units, rest = divmod(elements, _UNIT)
    if rest or not units:
        why = (
            f"DeepSpeed quantises multiples of {_UNIT}, and a rank's part of a module's weights has {elements} elements"
        )
        refuse("zero_quantized_weights", True, f"{why}; allowed: --gpus of which each gets a multiple, or off")
    least = -(-elements // _MOST)
    small = [n for n in range(1, isqrt(units) + 1) if not units % n]
    return min(n for n in (*small, *(units // n for n in small)) if n >= least)
