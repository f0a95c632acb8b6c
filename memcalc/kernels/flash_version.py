"""The version of flash-attn that transformers' layers run, and what its third does not take or is not modelled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_NAME: Final = "flash_attention_version"
_MULTIPLE: Final = 8


def flash_attention_version_of(options: Options, attention: str | None, engine: str, model: Model | None) -> int | None:
    """Return the version, 2 by default; None if transformers' layers run no flash-attn. Raises InputError for one that is not
    asked for, and for a third that does not run."""
    given = options.flash_attention_version
    of_gpt = engine == "megatron" or options.kernels == "megatron" or runs_gpt_model(options, engine)
    if attention != "flash" or of_gpt or model is None:
        if given is not None:
            refuse(_NAME, given, "is of flash-attn in transformers' layers; allowed: with --attention flash")
        return None
    if given == 3:
        _check_third(options, model)
    return given or 2


def runs_gpt_model(options: Options, engine: str) -> bool:
    """Tell whether Megatron-DeepSpeed's GPTModel runs, whose attention is the flash-attn package."""
    return engine == "deepspeed" and max(options.tp, options.pp) > 1 and not options.autotp


def _check_third(options: Options, model: Model) -> None:
    program: Any = model.program
    width = program.head_dim.size
    if width % _MULTIPLE:
        why = f"flash-attn 3 takes heads of a multiple of {_MULTIPLE}, not {width}"
        refuse(_NAME, 3, f"{why}; allowed: 2, which widens them")
    if options.gpu is None:
        return
    from memcalc.inputs.gpu import load_gpu

    found = load_gpu(options.gpu).compute_capability
    if found != "9.0":
        why = f"on {options.gpu}, of compute capability {found}, which is not Hopper's 9.0,"
        refuse(_NAME, 3, f"{why} {NOT_YET}2, or a Hopper --gpu such as h100-80gb")
