"""The parts of an explanation: a step has a formula, the numbers put in and the result; a section has steps."""

from __future__ import annotations

from typing import Literal, NamedTuple

Unit = Literal["bytes", "parameters", "flop", "ratio", "gpus", "seconds", "elements"]


class Step(NamedTuple):
    """One line of a derivation."""

    what: str
    formula: str
    numbers: str
    """The formula with numbers instead of names."""
    result: int | float
    unit: Unit
    why: str = ""
    source: str = ""


class Section(NamedTuple):
    """Steps that belong together, and sentences about them. Steps of a component of memory add up to its total."""

    title: str
    steps: tuple[Step, ...]
    text: tuple[str, ...] = ()
