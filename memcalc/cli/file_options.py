"""The options that take other tools' configuration files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from memcalc.cli.options import option

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_PANEL = "Files of other tools (options win over them)"

DeepSpeed = Annotated[
    str | None,
    option("DeepSpeed's JSON. \"auto\" is what transformers' Trainer makes of it.", _PANEL, "--deepspeed"),
]
Accelerate = Annotated[
    str | None, option("accelerate's YAML: DeepSpeed, FSDP, processes, mixed precision.", _PANEL, "--accelerate")
]
TrainingArgs = Annotated[
    str | None,
    option(
        "TrainingArguments in YAML or JSON, also of TRL, LLaMA-Factory or axolotl: model, batches, LoRA, the files it names.",
        _PANEL,
        "--training-args",
    ),
]
MegatronArgs = Annotated[
    str | None,
    option(
        "Megatron-LM's arguments, which describe the model too: one text, or a file (script, YAML, plain).",
        _PANEL,
        "--megatron-args",
    ),
]
Torchtitan = Annotated[str | None, option("torchtitan's TOML; the model is its flavor.", _PANEL, "--torchtitan")]
Layers = Annotated[
    str | None,
    option(
        "The model as a list of layers (conv2d, linear, lstm, …) with an input size, in YAML or JSON.",
        _PANEL,
        "--layers",
    ),
]
ExplainSetup = Annotated[
    bool,
    option("Print each option's value and where it came from, instead of the report.", "Output", "--explain-setup"),
]


def print_setup(report: Report, given: Mapping[str, Any], *, json: bool) -> None:
    """Print where each option of a report's setup came from."""
    from memcalc.report.origins import origins_document, print_origins

    if json:
        import json as library

        print(library.dumps(origins_document(report, given), indent=1, ensure_ascii=False))
    else:
        import sys
        from shutil import get_terminal_size

        print_origins(report, given, sys.stdout, get_terminal_size().columns)
