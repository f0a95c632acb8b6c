"""The options of `memcalc` itself, before any command."""

from __future__ import annotations

from typing import Annotated

import typer


def group(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    """Estimate the memory and communication of a transformer's training step, without a GPU."""
    # memcalc.cli.main answers --version, if it is the first word, without building any command
