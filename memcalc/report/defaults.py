"""Lines on the default engine and precision if nobody gave them, and on the options of common launchers.

Launchers differ in engine and precision, and so in bytes: the user may mean one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.errors import InputError
from memcalc.inputs.model import Model
from memcalc.inputs.options import check_options, option_name
from memcalc.setup.resolved import resolve
from memcalc.setup.setup import Setup

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


class Launcher(NamedTuple):
    """A tool that starts a training, and the options of its step."""

    name: str
    options: dict[str, Any]
    more: str = ""


LAUNCHERS: Final = (
    Launcher("HF Trainer with bf16=True", {"engine": "ddp", "precision": "bf16-autocast"}),
    Launcher("FSDP", {"engine": "fsdp2", "zero": 3}),
    Launcher("DeepSpeed", {"engine": "deepspeed", "zero": 2}, " (or 3)"),
)
"""The launchers on several GPUs: transformers' Trainer (fp32 weights under torch.autocast, DDP), the default sharding of
accelerate's FSDP and of torchtitan, and the stages that DeepSpeed's users run."""
ALONE: Final = (Launcher("HF Trainer with bf16=True", {"precision": "bf16-autocast"}),)
"""The launchers on one GPU: nothing is sharded, and Trainer's step is plain PyTorch's."""


def default_lines(report: Report) -> list[str]:
    """Return a sentence on the defaults that were chosen, and a sentence on what else the user may mean. Return [] if engine and
    precision were given, or if the setup was not resolved from options."""
    if report.given is None:
        return []
    given = {name: value for name, value in report.given.items() if value is not None}
    chosen = [_shown(report.setup, name) for name in _chosen(report.setup, given)]
    if not chosen:
        return []
    meant = [
        f"{one.name} is {_flags(one.options, given)}{'' if 'zero' in given else one.more}"
        for one in (ALONE if report.setup.gpus == 1 else LAUNCHERS)
        if _is_another(report, one, given)
    ]
    return [f"by default: {', '.join(chosen)}", *([f"your launcher may differ: {' · '.join(meant)}"] if meant else [])]


def _chosen(setup: Setup, given: dict[str, Any]) -> list[str]:
    """Return the options that decide what is stored and were not given. `zero` is among them only if the engine was given."""
    staged = setup.engine in ("fsdp2", "deepspeed") and "engine" in given
    return [name for name in ("engine", *(["zero"] if staged else []), "precision") if name not in given]


def _shown(setup: Setup, name: str) -> str:
    if name == "zero":
        return f"ZeRO {setup.zero}"
    return f"{name} {getattr(setup, name)}{' (plain PyTorch)' if getattr(setup, name) == 'none' else ''}"


def _is_another(report: Report, launcher: Launcher, given: dict[str, Any]) -> bool:
    """Return True if the launcher's step fits all given options, can be estimated, and differs from the reported one."""
    wanted = launcher.options | ({"zero": given["zero"]} if "zero" in given else {})
    if any(given.get(name, value) != value for name, value in wanted.items()):
        return False
    if all(getattr(report.setup, name) == value for name, value in wanted.items()):
        return False
    try:
        resolve(check_options({**given, **wanted}), report.model if isinstance(report.model, Model) else None)
    except InputError:
        return False
    return True


def _flags(options: dict[str, Any], given: dict[str, Any]) -> str:
    return " ".join(f"{option_name(name)} {value}" for name, value in options.items() if name not in given)
