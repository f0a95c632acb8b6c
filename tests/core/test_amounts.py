"""Live bytes as one integer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memcalc.core.amounts import amount, bytes_of, exceeds, undominated
from memcalc.core.dims import Dim
from memcalc.core.dtypes import bf16, fp32

BATCH, SEQ = Dim("batch", 3, (0, 0, 0, 1, 0, 0)), Dim("seq", 7, (0, 1, 0, 0, 0, 0))
COEFFICIENTS = st.tuples(*[st.integers(-(10**6), 10**12)] * 6)


def block(poly: tuple[int, ...]) -> int:
    return amount((Dim("n", 1, poly),), fp32, "activation")  # type: ignore[arg-type]


def at(poly: tuple[int, ...], batch: int, seq: int) -> int:
    c0, c1, c2, b0, b1, b2 = poly
    return c0 + c1 * seq + c2 * seq**2 + batch * (b0 + b1 * seq + b2 * seq**2)


def test_an_amount_is_its_bytes() -> None:
    assert bytes_of(amount((BATCH, SEQ), bf16, "activation")) == ((0, 0, 0, 0, 2, 0), 0)
    assert bytes_of(amount((Dim("n", 5),), fp32, "gradients")) == ((0, 0, 0, 0, 0, 0), 20)
    assert amount((Dim("n", 5),), fp32, "parameters") == 0


@given(COEFFICIENTS, COEFFICIENTS)
def test_amounts_add_up(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    together = tuple(4 * (a + b) for a, b in zip(left, right, strict=True))
    assert bytes_of(block(left) + block(right)) == (together, 0)


@given(COEFFICIENTS, COEFFICIENTS, st.integers(1, 64), st.integers(1, 10**5))
def test_what_exceeds_is_larger_at_every_batch_and_sequence(
    left: tuple[int, ...], right: tuple[int, ...], batch: int, seq: int
) -> None:
    if exceeds(block(left), block(right)):
        assert at(left, batch, seq) >= at(right, batch, seq)


@given(st.lists(COEFFICIENTS, max_size=12), st.integers(1, 64), st.integers(1, 10**5))
def test_the_largest_is_among_the_undominated(polys: list[tuple[int, ...]], batch: int, seq: int) -> None:
    kept = [bytes_of(one)[0] for one in undominated({block(poly) for poly in polys})]
    assert max((at(poly, batch, seq) for poly in kept), default=None) == max(
        (4 * at(poly, batch, seq) for poly in polys), default=None
    )
    assert not any(exceeds(block(a), block(b)) for a in kept for b in kept if a != b)
