"""What `memcalc` itself takes, before any command."""

from __future__ import annotations

from typing import Annotated

import typer


def group(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    """What a transformer's training step needs, per GPU, before anyone books one."""
    # --version comes first and alone: memcalc.cli.main answers it without building any command
