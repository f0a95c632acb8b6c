"""A question of the quiz, with its answer and how that is derived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.explanation.step import Section
    from memcalc.quiz.numbers import Draw

Quantity = Literal["bytes", "flop", "ratio", "parameters", "elements", "gpus", "micro-batches", "truth"]
WHOLE: Final[tuple[Quantity, ...]] = ("gpus", "micro-batches")
"""Quantities that are small whole numbers, so that an answer is exact or wrong."""
LEVELS: Final = {
    1: Words("by the rule of thumb", "按经验法则"),
    2: Words("rules compared", "法则之间的比较"),
    3: Words("as the engine does it", "引擎的实际做法"),
}
PERCENT_OF_A_RULE: Final = 2
PERCENT_OF_A_REPORT: Final = 3
"""The tolerances in percent. Both are below 4.9, so that MB is not taken for MiB, nor GB for GiB."""


@dataclass(frozen=True)
class Question:
    """A question in one language. `answer` is in bytes, FLOP, a plain ratio or a count; True or False for a yes or no."""

    topic: str
    level: int
    kind: str
    text: str
    given: str
    """The numbers that the answer depends on, as a sentence; '' if all of them are in the text."""
    quantity: Quantity
    answer: int | float | bool
    percent: int
    """The tolerance: an answer is right within so many percent."""
    hint: str
    derivation: tuple[Section, ...]
    command: str
    """A command that shows the answer's rule or number."""
    by_rule: int | float | None = None
    """The number that the rule of thumb gives instead; None if the question asks for that one."""

    def is_right(self, number: Fraction | bool) -> bool:
        """Return True if a number, in the unit of `answer`, is within the tolerance."""
        if isinstance(self.answer, bool) or isinstance(number, bool):
            return number is self.answer
        return _is_within(number, Fraction(self.answer), self.percent)

    def is_the_rules(self, number: Fraction) -> bool:
        """Return True if a number is what the rule of thumb gives, within the tolerance."""
        return self.by_rule is not None and _is_within(number, Fraction(self.by_rule), self.percent)


def _is_within(number: Fraction, exact: Fraction, percent: int) -> bool:
    return 100 * abs(number - exact) <= percent * abs(exact)


class Kind(NamedTuple):
    """A kind of question: each draw of random numbers makes another question of it."""

    topic: str
    level: int
    name: str
    make: Callable[[Draw, str], Question]
    """Takes the source of random numbers and the language."""


def percent_of(quantity: Quantity, percent: int) -> int:
    """Return the tolerance of a quantity: 0 where the answer is a small whole number, or yes or no."""
    return 0 if quantity in WHOLE or quantity == "truth" else percent
