"""The versions that estimates are for, and what is said where others run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

from memcalc.inputs.options import refuse

ESTIMATED: Final[Mapping[str, str]] = {"torch": "2.13.0", "transformers": "5.23.0"}
"""Those that every estimate is tested against: the pins of the package's extra `validate`."""


def others(environment: Mapping[str, str]) -> str:
    """What ran where that is not what estimates are for, in words; nothing otherwise."""
    ran = {name: environment[name].split("+")[0] for name in ESTIMATED if name in environment}
    if all(ran[name] == ESTIMATED[name] for name in ran):
        return ""
    return (
        f"ran with {_named(ran)}; estimates are for {_named(ESTIMATED)}: rows may differ by what changed between them"
    )


def refuse_older(field: str, value: int) -> NoReturn:
    """InputError: the transformers that is here cannot run what is estimated of a later one."""
    import transformers

    theirs = ESTIMATED["transformers"]
    refuse(field, value, f"to be run needs transformers {theirs}, here is {transformers.__version__}; allowed: 1")


def _named(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
