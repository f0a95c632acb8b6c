"""Formulas as people write them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.explanation.arithmetic import evaluated, with_numbers

NUMBERS = st.integers(1, 10**15)


@given(parameters=NUMBERS, ranks=NUMBERS)
def test_a_formula_is_what_python_makes_of_it(parameters: int, ranks: int) -> None:
    found = evaluated("4·Φ + 12·Φ/n", {"Φ": parameters, "n": ranks})
    assert found == 4 * parameters + Fraction(12 * parameters, ranks)


@given(a=NUMBERS, b=NUMBERS)
def test_numbers_alone_are_the_same_formula(a: int, b: int) -> None:
    numbers = {"a": a, "b": b}
    written = with_numbers("a·(2·a - b)/(a + b)", numbers)
    assert evaluated(written) == evaluated("a·(2·a - b)/(a + b)", numbers)


def test_squares_and_signs() -> None:
    assert evaluated("16·h²", {"h": 4096}) == 16 * 4096**2
    assert evaluated("-3 + 1.5") == Fraction(-3, 2)


def test_a_name_without_a_number_is_an_error() -> None:
    with pytest.raises(KeyError):
        evaluated("a + b", {"a": 1})
