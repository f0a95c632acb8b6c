"""Whether a typed answer is right, and what is wrong with it: the number, or its unit alone."""

from __future__ import annotations

from fractions import Fraction
from typing import Final, NamedTuple

from memcalc.explanation.words import Words
from memcalc.quiz.answers import Typed, typed, unit_sizes
from memcalc.quiz.question import Question


class Judged(NamedTuple):
    """A verdict, and a sentence about the answer; None where there is nothing to say."""

    right: bool
    words: Words | None = None


THE_RULES: Final = Words(
    "That is what the rule of thumb gives. The engine does something else.", "这是经验法则的结果，引擎的做法不同。"
)
_SPELLED: Final = {
    "kb": "kB",
    "mb": "MB",
    "gb": "GB",
    "tb": "TB",
    "pb": "PB",
    "kib": "KiB",
    "mib": "MiB",
    "gib": "GiB",
    "tib": "TiB",
}
_UNITS: Final = ("gb", "gib", "mb", "mib", "tb", "tib", "kb", "kib", "b")
_FLOPS: Final = ("tflop", "gflop", "pflop", "mflop", "eflop", "flop")


def judge(question: Question, line: str) -> Judged:
    """Return the verdict on a line. NotANumber where it cannot be read."""
    answer = typed(line, question.quantity)
    if isinstance(answer, bool):
        return Judged(question.is_right(answer))
    if question.is_right(answer.value):
        return Judged(True)
    if question.is_the_rules(answer.value):
        return Judged(False, THE_RULES)
    return Judged(False, _unit_alone(question, answer) or _how_far(question, answer.value))


def _unit_alone(question: Question, answer: Typed) -> Words | None:
    """Return the unit with which the number would be right, said as a sentence; None if there is none."""
    if question.quantity == "ratio":
        return _percent_or_times(question, answer)
    sizes = unit_sizes(question.quantity)
    for unit in _UNITS if question.quantity == "bytes" else _FLOPS:
        if unit in sizes and question.is_right(answer.number * sizes[unit]):
            right = _SPELLED.get(unit, unit.upper())
            return Words(
                f"The number is right, the unit is not: it is {right}. GB is 10^9 and GiB is 2^30 bytes."
                if question.quantity == "bytes"
                else f"The number is right, the unit is not: it is {right}.",
                f"数字正确，单位不对：应为 {right}。GB 是 10^9 字节，GiB 是 2^30 字节。"
                if question.quantity == "bytes"
                else f"数字正确，单位不对：应为 {right}。",
            )
    return None


def _percent_or_times(question: Question, answer: Typed) -> Words | None:
    if question.is_right(answer.number / 100):
        return Words("The number is right as a percentage, with %.", "数字正确，但它是百分数，要带 %。")
    if question.is_right(answer.number):
        return Words("The number is right as a factor, without %.", "数字正确，但它是倍数，不带 %。")
    if answer.number and question.is_right(1 / answer.value):
        return Words("That is the ratio the other way round.", "比的方向反了。")
    return None


def _how_far(question: Question, value: Fraction) -> Words | None:
    """Return how far a number is from the answer, said as a sentence."""
    exact = Fraction(question.answer)
    if value <= 0 or not exact:
        return None
    times = value / exact
    if Fraction(1, 100) < times < 100:
        return Words(f"It is {float(times):.3g} times the answer.", f"它是正确答案的 {float(times):.3g} 倍。")
    return Words("It is far from the answer.", "与正确答案相差很远。")
