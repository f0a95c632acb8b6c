"""What `memcalc infer` does not answer, in one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import InputError

if TYPE_CHECKING:
    from memcalc.inference.options import Asked
    from memcalc.inputs.model import Model


def refuse_model(model: Model, asked: Asked) -> None:
    """Raise InputError for a model without a cache, or one that has no program on paper."""
    program = model.program
    if program.source:
        raise InputError(
            f"--model {model.name}: a {model.model_type} has no program here, and its cache is not known; "
            "allowed: a type that `memcalc models` lists"
        )
    if model.support.only_engine is not None:
        raise InputError(f"--model {model.name}: a {model.model_type} is trained by {model.support.only_engine} alone")
    if program.cacheless is not None:
        raise InputError(f"--model {model.name}: a {model.model_type} {program.cacheless}, so it has no cache to size")
    for name in ("block_size", "gpu_memory_utilization"):
        if getattr(asked, name) is not None:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} {getattr(asked, name)}: transformers' cache has no blocks; leave it out")
    if asked.cache == "static" and not program.one_stack:
        raise InputError(f"--cache static: not modelled for a {model.model_type}; allowed: dynamic")
