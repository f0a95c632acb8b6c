"""The GPUs that a plan may use: names, and numbers of GPUs from a range."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, cast

from memcalc.errors import InputError, one_line
from memcalc.inputs.gpu import named_gpu
from memcalc.inputs.options import WHOLE

if TYPE_CHECKING:
    from collections.abc import Sequence

_RANGE: Final = re.compile(r"([0-9]{1,7})\.\.([0-9]{1,7})", re.ASCII)
_MOST_MULTIPLES: Final = 32
"""The most multiples of a node that are tried; of a longer range the multiples of 2, 4, 8 ... nodes."""


def gpu_names(given: object) -> tuple[str, ...]:
    """Return the names of GPUs from a comma list or a list, each once."""
    if given is None:
        raise InputError("--gpu: is needed, the GPU to plan for; as in: memcalc plan llama-7b --gpu h100-80gb --gpus 8")
    words: list[object] = [*given.split(",")] if isinstance(given, str) else [given]
    if isinstance(given, (list, tuple)):
        words = [*cast("Sequence[object]", given)]
    return tuple(dict.fromkeys(named_gpu(str(word).strip()).name for word in words))


def gpu_counts(given: object, gpus_per_node: int) -> tuple[int, ...]:
    """Return the numbers of GPUs: a number, or of a range "8..512" the powers of two and the multiples of nodes."""
    low, high = WHOLE["gpus"]
    allowed = f"allowed: a whole number from {low} to {high}, or a range such as 8..512"
    if isinstance(given, int) and not isinstance(given, bool):
        first = last = given
    else:
        match = _RANGE.fullmatch(str(given).strip())
        alone = str(given).strip()
        if match is None and not (alone.isascii() and alone.isdigit() and len(alone) < 8):
            raise InputError(f"--gpus {one_line(given)}: {allowed}")
        first, last = (int(match[1]), int(match[2])) if match else (int(alone), int(alone))
    if not low <= first <= last <= high:
        raise InputError(f"--gpus {one_line(given)}: {allowed}")
    if first == last:
        return (first,)
    found = {1 << i for i in range(last.bit_length()) if first <= 1 << i <= last}
    unit = gpus_per_node
    while last // unit - (first - 1) // unit > _MOST_MULTIPLES:
        unit *= 2
    found |= set(range(-(-first // unit) * unit, last + 1, unit))
    return tuple(sorted(found)) or (first, last)
