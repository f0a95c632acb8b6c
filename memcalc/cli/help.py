"""Help in two lengths: on one screen the options that everyone needs, or every option."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

HELP_ALL: Final = "help_all"
FLAG: Final = "--help-all"
SHORT: Final = {
    "model": "Bundled name, Hub id, config.json or its folder.",
    "params": "A size alone (7.5B): model states only.",
    "precision": "bf16-mixed (default), bf16-autocast, fp32, ...",
    "gpus": "Total GPUs. (default: 1)",
    "zero": "ZeRO stage, 0 to 3. (default: 0; fsdp2: 3)",
    "engine": "none, ddp, fsdp2, deepspeed, megatron.",
    "tp": "Tensor parallel degree. (default: 1)",
    "pp": "Pipeline parallel degree. (default: 1)",
    "cp": "Context parallel degree. (default: 1)",
    "micro_batch_size": "Sequences per forward pass. (default: 1)",
    "seq_len": "Tokens of a sequence, also 4k.",
    "global_batch_size": "Sequences per step.",
    "optimizer": "adamw (default), sgd, adamw-8bit, ...",
    "recompute": "none (default), full, op, selective.",
    "attention": "sdpa (default), eager, flash.",
    "gpu": "Does it fit? A name of `memcalc gpus`, 80GB, auto.",
    "check": "Exit with 1 if it does not fit --gpu.",
    "output": "Write to this file (.json, .csv, .md).",
    "html": "Write a page with pictures.",
}
"""The setup options that `--help` lists, with their short help; and the short help of some options of commands."""
_COLUMNS_OF_HELP: Final = 26
"""The width of the help column on a terminal of 80 columns, beside the longest names. typer cuts longer words."""
_LEFT_OUT: Final = ("name", "format", "help", "snapshot", "trace", "explain_setup")
"""The parameters that `--help` leaves out: the usage line or another option stands for them, or few need them."""


def shorten(command: Any, setup: Collection[str]) -> None:
    """Hide the options of `setup` that are not in SHORT, and set the short help, for a typer command that has `--help-all`."""
    if HELP_ALL not in [parameter.name for parameter in command.params]:
        return
    for parameter in command.params:
        parameter.hidden = parameter.name in _LEFT_OUT or (parameter.name in setup and parameter.name not in SHORT)
        parameter.help = SHORT.get(parameter.name, parameter.help)


def name_off_forms(command: Any) -> None:
    """Move the `--no-` form of each switch into its help text. In a column of its own it leaves no room for the names."""
    for parameter in command.params:
        if parameter.secondary_opts and parameter.help:
            off = parameter.secondary_opts[0]
            parameter.help += f" Off: {off if len(off) <= _COLUMNS_OF_HELP else 'with --no- before its name'}."
            parameter.secondary_opts = []


def as_help(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with `--help` in the place of `--help-all`."""
    return ["--help" if word == FLAG else word for word in arguments]
