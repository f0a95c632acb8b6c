"""The GPUs that flash-attn has kernels for: those of NVIDIA from Ampere on (mha_fwd in csrc/flash_attn/flash_api.cpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import refuse

if TYPE_CHECKING:
    from memcalc.inputs.options import Options

_OLDEST: Final = 8
"""The first compute capability that is taken."""


def check_gpu(options: Options) -> None:
    """Raise InputError for a GPU of NVIDIA that is too old."""
    if options.gpu is None:
        return
    from memcalc.inputs.gpu import load_gpu

    found = load_gpu(options.gpu).compute_capability
    if found.replace(".", "").isdigit() and int(found.split(".")[0]) < _OLDEST:
        why = f"flash-attn needs compute capability {_OLDEST}.0, and {options.gpu} has {found}"
        refuse("attention", "flash", f"{why}; allowed: sdpa, or a newer --gpu")
