"""The options of FSDP1 alone: which tensors its optimizer sees, and when it gathers ahead."""

from __future__ import annotations

from typing import Any, Final

from memcalc.inputs.options import Options, refuse

_DEFAULTS: Final = {"use_orig_params": True, "backward_prefetch": "pre", "forward_prefetch": False}
"""accelerate's launcher has these (commands/launch.py): use_orig_params true, BACKWARD_PRE, no forward prefetch."""


def fsdp1_options(options: Options, engine: str) -> dict[str, Any]:
    """Return the options of FSDP1 as resolved; None with another engine. Raises InputError if one is given there."""
    out: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        given = getattr(options, name)
        if engine != "fsdp1" and given is not None:
            refuse(name, given, "is an option of FullyShardedDataParallel; allowed: with --engine fsdp1")
        out[name] = None if engine != "fsdp1" else default if given is None else given
    return out
