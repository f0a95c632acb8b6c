"""Unknown numbers: what is computed with them holds for every value; what a value would decide is decided or open."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.core.dims import evaluate
from memcalc.core.unknowns import Number, Undecided, Whole, terms_of, unknown

LEAST = (2, 1, 3)
BATCH, ROWS, STEPS = (unknown(which, LEAST) for which in range(3))
VALUES = st.tuples(st.integers(2, 50), st.integers(1, 50), st.integers(3, 50))
COEFFICIENTS = st.integers(-4, 4)
COMPARED: tuple[Callable[[Any, Any], Any], ...] = (
    operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
)  # fmt: skip


def at(number: Whole, values: tuple[int, int, int]) -> int:
    """The number for these values."""
    x, y, z = values
    return sum(c * x**i * y**j * z**k for (i, j, k), c in terms_of(number).items())


@st.composite
def numbers(draw: st.DrawFn) -> Number:
    """Sums and products of unknown numbers and known ones."""
    a, b, c, d = (draw(COEFFICIENTS) for _ in range(4))
    return (a * BATCH + b) * ROWS - (STEPS * c - d) * (ROWS + 1)


@given(numbers(), numbers(), VALUES)
def test_sums_and_products_are_those_of_the_values(one: Number, other: Number, values: tuple[int, int, int]) -> None:
    for does in (operator.add, operator.sub, operator.mul):
        assert at(does(one, other), values) == does(at(one, values), at(other, values))
    assert at(7 - one, values) == 7 - at(one, values)
    assert at(-one, values) == -at(one, values)


@given(numbers(), st.integers(-30, 30), VALUES)
def test_a_comparison_that_is_decided_is_that_of_all_values(
    one: Number, other: int, values: tuple[int, int, int]
) -> None:
    for does in COMPARED:
        try:
            decided = does(one, other)
        except Undecided:
            continue
        assert decided == does(at(one, values), other)


@given(numbers(), st.integers(1, 4), VALUES)
def test_a_quotient_leaves_nothing_over(one: Number, divisor: int, values: tuple[int, int, int]) -> None:
    for by in (divisor, divisor * BATCH, divisor * BATCH * STEPS):
        assert at(one * by // by, values) == at(one, values)
        assert one * by % by == 0
        try:
            quotient = one // by
        except Undecided:
            continue
        assert at(quotient, values) * at(by, values) == at(one, values)


def test_least_values_decide() -> None:
    assert BATCH > 1
    assert not BATCH < 2
    assert STEPS >= 3
    assert min(STEPS, 2) == 2
    assert BATCH != 1
    assert bool(ROWS)
    assert (BATCH * ROWS == BATCH * ROWS) is True


@pytest.mark.parametrize(
    "decides",
    [
        lambda: STEPS > 3,
        lambda: BATCH == 2,
        lambda: min(STEPS, 4),
        lambda: BATCH == ROWS,
        lambda: bool(BATCH - ROWS),
        lambda: range(STEPS),
        lambda: [0] * STEPS,
        lambda: {STEPS: 0},
        lambda: int(STEPS),
        lambda: ROWS // 2,
        lambda: ROWS % 2,
        lambda: 8 // ROWS,
        lambda: (BATCH + ROWS) // BATCH,
    ],
)
def test_what_a_value_would_decide_is_open(decides: Callable[[], object]) -> None:
    with pytest.raises(Undecided):
        decides()


def test_polynomials_take_them() -> None:
    poly = (1, 2, 3, 4, 5, 6)
    assert at(evaluate(poly, BATCH, ROWS), (7, 9, 3)) == evaluate(poly, 7, 9)  # type: ignore[arg-type]
