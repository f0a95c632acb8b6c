"""Names of optimizers in the files of transformers' Trainer and of the tools over it.

Source: transformers/training_args.py (OptimizerNames), transformers/trainer_optimizer.py; axolotl's
utils/schemas/enums.py.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from memcalc.errors import nearest
from memcalc.formats.section import Section
from memcalc.formats.trainer_findings import Findings


class _Optimizer(NamedTuple):
    """How an optimizer is counted."""

    optimizer: str
    implementation: str | None = None
    note: str = ""


_AS_ADAMW: Final = "counted as torch's AdamW, which keeps as many states"
_AS_MOMENTUM: Final = "counted as torch's SGD with momentum, which keeps as many states"
_AS_8BIT: Final = "counted as bitsandbytes' AdamW of 8 bits"
_NAMES: Final[dict[str, _Optimizer]] = {
    "adamw_torch": _Optimizer("adamw", "foreach"),
    "adamw_torch_fused": _Optimizer("adamw", "fused"),
    "adamw_hf": _Optimizer("adamw", "for-loop", "transformers' own AdamW is counted as torch's, a parameter at a time"),
    "adamw_apex_fused": _Optimizer("adamw", "fused", "apex's AdamW is counted as torch's fused one"),
    "adamw_anyprecision": _Optimizer("adamw", "for-loop", "counted as torch's AdamW with fp32 states"),
    "schedule_free_adamw": _Optimizer("adamw", "foreach", _AS_ADAMW),
    "schedule_free_radam": _Optimizer("adamw", "foreach", _AS_ADAMW),
    "stable_adamw": _Optimizer("adamw", "for-loop", f"{_AS_ADAMW}, without its Kahan sums"),
    "optimi_adamw": _Optimizer("adamw", "for-loop", f"{_AS_ADAMW}, without its Kahan sums"),
    "adopt_adamw": _Optimizer("adamw", "foreach", _AS_ADAMW),
    "adamw_8bit": _Optimizer("adamw-8bit"),
    "adamw_bnb_8bit": _Optimizer("adamw-8bit"),
    "paged_adamw": _Optimizer("paged-adamw"),
    "paged_adamw_32bit": _Optimizer("paged-adamw"),
    "paged_adamw_8bit": _Optimizer("paged-adamw-8bit"),
    "adamw_torch_8bit": _Optimizer("adamw-8bit", None, f"torchao's is {_AS_8BIT}"),
    "ao_adamw_8bit": _Optimizer("adamw-8bit", None, f"torchao's is {_AS_8BIT}"),
    "ao_adamw_fp8": _Optimizer("adamw-8bit", None, f"torchao's is {_AS_8BIT}"),
    "adamw_torch_4bit": _Optimizer("adamw-8bit", None, f"{_AS_8BIT}, an upper bound"),
    "ao_adamw_4bit": _Optimizer("adamw-8bit", None, f"{_AS_8BIT}, an upper bound"),
    "adafactor": _Optimizer("adafactor", None, "transformers' Adafactor is counted as torch's"),
    "lion_32bit": _Optimizer("lion", None, "bitsandbytes' Lion, whose state is fp32, is counted as lion-pytorch's"),
    "lion_8bit": _Optimizer("lion-8bit"),
    "paged_lion_32bit": _Optimizer("paged-lion"),
    "paged_lion_8bit": _Optimizer("paged-lion-8bit"),
    "sgd": _Optimizer("sgd", "foreach"),
    "rmsprop": _Optimizer("sgd-momentum", "foreach", _AS_MOMENTUM),
    "adagrad": _Optimizer("sgd-momentum", "foreach", _AS_MOMENTUM),
    "schedule_free_sgd": _Optimizer("sgd-momentum", "foreach", _AS_MOMENTUM),
    "galore_adamw": _Optimizer("galore-adamw"),
    "apollo_adamw": _Optimizer("apollo-adamw"),
    "muon": _Optimizer("muon"),
    "lomo": _Optimizer("lomo"),
    "adalomo": _Optimizer("adalomo"),
}
"""Names that can be counted. All else has other states, or other hardware."""
_LOW_RANK: Final = ("galore_adamw", "apollo_adamw")
LOW_RANK: Final = 128
"""The rank of memcalc's GaLore and APOLLO."""


def read_optimizer(found: Findings, key: str, default: str) -> None:
    """Set the optimizer and its implementation. Raises InputError for a name that cannot be counted."""
    section = found.section
    text = section.text(key)
    name = default if text is None else text.strip().lower().removeprefix("optimizernames.")
    if name not in _NAMES:
        close = nearest(name, _NAMES, most=1, cutoff=0.8)
        hint = f" (did you mean {close[0]}?)" if close else ""
        section.refuse(key, f"is not modelled; allowed: {', '.join(_NAMES)}{hint}")
    optimizer, implementation, note = _NAMES[name]
    arguments = _arguments(section)
    if name == "sgd" and arguments.get("momentum", "0").strip("0.") != "":
        optimizer = "sgd-momentum"
    found.take("optimizer", key, None if text is None else optimizer, optimizer)
    if implementation is not None:
        found.take("optimizer_implementation", key, None if text is None else implementation, implementation)
    if note:
        found.note(key, note)
    if name in _LOW_RANK:
        _check_rank(found, arguments)


def read_clipping(found: Findings, default: float | None = 1.0) -> None:
    """Set clipping by `max_grad_norm`: a number above 0 clips."""
    section, key = found.section, "max_grad_norm"
    norm = section.number(key)
    if norm is None and key in section.content:
        found.give("clip_grad_norm", key, False)
    elif norm is None:
        found.assume("clip_grad_norm", key, default is not None and default > 0)
    else:
        found.give("clip_grad_norm", key, norm > 0)


def _arguments(section: Section) -> dict[str, str]:
    """Return `optim_args`, "rank=64,scale=0.1" or a mapping, as text by name."""
    value = section.raw("optim_args")
    if isinstance(value, str):
        parts = [part.split("=", 1) for part in value.replace(" ", "").split(",") if "=" in part]
        return dict(parts)
    if value is None:
        return {}
    arguments = section.section("optim_args")
    return {str(key): str(arguments.raw(key)) for key in arguments.content}


def _check_rank(found: Findings, arguments: dict[str, str]) -> None:
    rank = arguments.get("rank", str(LOW_RANK))
    if rank != str(LOW_RANK):
        found.section.refuse("optim_args", f"allowed: rank={LOW_RANK}, the one that is modelled")
    if "optim_target_modules" in found.section:
        found.note("optim_target_modules", "all matrices of the layers are taken")
