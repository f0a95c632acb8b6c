"""`memcalc.emit`: a setup as another tool's configuration file or command line."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from memcalc.errors import InputError, one_line
from memcalc.formats.given import with_files
from memcalc.inputs.model import load_model
from memcalc.inputs.options import check_options, refuse
from memcalc.setup.resolved import resolve

if TYPE_CHECKING:
    from memcalc.formats.written import Written
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_WITHOUT_FILE: Final = ("data-parallel", "parameter-server")
FORMATS: Final = ("deepspeed", "accelerate", "training-args", "megatron", "torchtitan", "torchrun")


def emit(format: str, model: Any = None, **options: Any) -> Written:
    """Return the file's text, and the options that the format cannot say.

    Give `model` and `options` as for `memcalc.estimate`. Raise InputError for a setup that is not valid, or that the format
    has nothing like.
    """
    check_format(format)
    own_gpu = options.get("gpu")
    model, options, _ = with_files(model, options)
    options |= {"gpu": own_gpu}  # this machine's is no part of a job's file
    if model is None:
        raise InputError("--model: is needed; as in: memcalc emit deepspeed llama-7b --zero 3 --gpus 8")
    loaded = load_model(model)
    return written(format, resolve(check_options(options), loaded), loaded)


def written(format: str, setup: Setup, model: Model) -> Written:
    """Return a resolved setup in a format. Raise InputError for one that the format has nothing like."""
    check_format(format)
    if setup.engine == "colossalai" and format != "torchrun":
        refuse(
            "engine",
            setup.engine,
            "Colossal-AI's own configuration is not written by this version; allowed: emit torchrun",
        )
    if setup.engine in _WITHOUT_FILE:
        refuse(
            "engine",
            setup.engine,
            f"no file describes it; allowed with emit {format}: none, ddp, fsdp2, deepspeed, megatron",
        )
    return import_module(f"memcalc.formats.{format.replace('-', '_')}_writer").write(setup, model)


def check_format(format: str) -> None:
    """Raise InputError for a format that is none."""
    if format not in FORMATS:
        raise InputError(f"emit {one_line(format)}: allowed: {', '.join(FORMATS)}")
