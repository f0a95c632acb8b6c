"""The optimizer of several files: whose it is, and what becomes of it where DeepSpeed keeps its states on the host.

Source: accelerate 1.15 accelerator.py (_prepare_deepspeed), utils/deepspeed.py (map_pytorch_optim_to_deepspeed); transformers
5.23 integrations/deepspeed.py (deepspeed_optim_sched).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from memcalc.formats.found import Value

_OPTIMIZER: Final = "optimizer"
_IMPLEMENTATION: Final = "optimizer_implementation"
_AS_ADAM: Final = "accelerate puts DeepSpeed's own Adam on the host in its place"
_ADAMS: Final = ("adamw", "adam")
_OTHERS_ON_HOST: Final = ("lion", "lion-8bit", "paged-lion", "paged-lion-8bit")
"""The optimizers of which accelerate makes another one of DeepSpeed's on the host."""


def with_optimizer_of_engine(
    given: Mapping[str, Any], said: Mapping[str, Value], of_deepspeed: Mapping[str, Value]
) -> tuple[dict[str, Value], list[str]]:
    """Return what files say and notes. The implementation goes with the optimizer that a DeepSpeed file names; on the host the
    Trainer's optimizer becomes DeepSpeedCPUAdam. `of_deepspeed`: what that file says alone."""
    out, notes = dict(said), list[str]()
    if _OPTIMIZER in of_deepspeed and _IMPLEMENTATION not in of_deepspeed:
        out.pop(_IMPLEMENTATION, None)
        return out, notes
    if (
        not of_deepspeed
        or _of(given, out, "engine") != "deepspeed"
        or _of(given, out, "offload_optimizer") in (None, "none")
    ):
        return out, notes
    if _OPTIMIZER in of_deepspeed or _OPTIMIZER in given:
        return out, notes
    out.pop(_IMPLEMENTATION, None)
    optimizer = out.get(_OPTIMIZER)
    if optimizer is not None and optimizer.value not in (*_ADAMS, *_OTHERS_ON_HOST):
        out[_OPTIMIZER] = optimizer._replace(value="adam")
        notes.append(f"{optimizer.where} ({optimizer.value}): {_AS_ADAM}")
    return out, notes


def _of(given: Mapping[str, Any], said: Mapping[str, Value], name: str) -> Any:
    return given.get(name, said[name].value if name in said else None)
