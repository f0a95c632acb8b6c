"""The versions that estimates are for, and the note for runs with other versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

from memcalc.inputs.options import refuse

ESTIMATED: Final[Mapping[str, str]] = {"torch": "2.13.0", "transformers": "5.23.0"}
"""The versions that every estimate is tested against: the pins of the package's extra `validate`."""


def others(environment: Mapping[str, str]) -> str:
    """Return a sentence if a run had other versions than estimates are for; '' otherwise."""
    ran = {name: environment[name].split("+")[0] for name in ESTIMATED if name in environment}
    if all(ran[name] == ESTIMATED[name] for name in ran):
        return ""
    return (
        f"ran with {_named(ran)}; estimates are for {_named(ESTIMATED)}: rows may differ by what changed between them"
    )


def refuse_older(field: str, value: int) -> NoReturn:
    """Raise InputError: the installed transformers cannot run what is estimated for a later one."""
    import transformers

    theirs = ESTIMATED["transformers"]
    refuse(field, value, f"to be run needs transformers {theirs}, here is {transformers.__version__}; allowed: 1")


def _named(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
