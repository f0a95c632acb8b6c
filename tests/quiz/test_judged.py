"""Verdicts: the tolerance from both sides, and a wrong unit told from a wrong number."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.quiz.judged import judge
from memcalc.quiz.question import Quantity, Question
from memcalc.units import to_bytes


def asked(answer: float | bool, quantity: Quantity = "bytes", percent: int = 2) -> Question:
    return Question("adam", 1, "k", "?", "", quantity, answer, percent, "", (), "memcalc explain adam")


def said(question: Question, line: str) -> str:
    judged = judge(question, line)
    assert not judged.right
    assert judged.words is not None
    assert judged.words.zh
    return judged.words.en


@given(st.integers(10**4, 10**14), st.sampled_from([2, 3]))
def test_the_edges_of_the_tolerance(answer: int, percent: int) -> None:
    question = asked(answer, percent=percent)
    for sign in (1, -1):
        edge = Fraction(answer) * (100 + sign * percent) / 100
        inside, outside = edge - sign * Fraction(1, 100), edge + sign * Fraction(1, 100)
        assert judge(question, f"{_decimal(inside)} B").right
        assert not judge(question, f"{_decimal(outside)} B").right


def _decimal(number: Fraction) -> str:
    return f"{Decimal(number.numerator) / Decimal(number.denominator):.4f}"


@given(st.integers(10**6, 10**14), st.sampled_from(["B", "MB", "GB", "TB", "MiB", "GiB", "TiB"]))
def test_the_answer_in_any_unit_is_right(answer: int, unit: str) -> None:
    number = answer / to_bytes(1, unit)
    assert judge(asked(answer), f"{number:.12g} {unit}").right
    assert judge(asked(answer), f"{number:.4e}{unit}").right


@given(st.integers(10**9, 10**13), st.sampled_from([("GB", "GiB"), ("GiB", "GB"), ("MB", "MiB"), ("MiB", "MB")]))
def test_the_number_in_the_other_base_is_the_unit_alone(answer: int, units: tuple[str, str]) -> None:
    right, wrong = units
    line = f"{answer / to_bytes(1, right):.6f} {wrong}"
    assert f"it is {right}." in said(asked(answer), line)


@pytest.mark.parametrize(
    ("answer", "quantity", "line", "words"),
    [
        (112 * 10**9, "bytes", "112 MB", "it is GB."),
        (112 * 10**9, "bytes", "120 GB", "1.07 times the answer"),
        (112 * 10**9, "bytes", "5 MB", "far from"),
        (0.125, "ratio", "12.5", "as a percentage"),
        (2, "ratio", "2%", "without %"),
        (0.5, "ratio", "2", "the other way round"),
        (86 * 10**12, "flop", "86 GFLOP", "it is TFLOP."),
        (24, "gpus", "32", "1.33 times"),
    ],
)
def test_what_is_wrong_with_it(answer: float, quantity: Quantity, line: str, words: str) -> None:
    assert words in said(asked(answer, quantity, 0 if quantity == "gpus" else 2), line)


def test_the_rules_number_is_told() -> None:
    question = replace(asked(87 * 10**9), by_rule=58 * 10**9)
    assert "rule of thumb" in said(question, "58.2 GB")
    assert "rule of thumb" not in said(question, "70 GB")


def test_yes_and_no() -> None:
    assert judge(asked(True, "truth"), "yes").right
    assert not judge(asked(True, "truth"), "no").right
    assert judge(asked(False, "truth"), "否").right


def test_a_whole_number_is_exact() -> None:
    assert judge(asked(24, "gpus", 0), "24").right
    assert not judge(asked(200, "gpus", 0), "201").right
