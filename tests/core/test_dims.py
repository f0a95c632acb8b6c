"""Named dims: sizes and their polynomials in batch and seq say the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.core.dims import ONE_DIM, Dim, divided, evaluate, formula, merge, multiply, numel, plus, workload_size

SIZES = st.integers(1, 50)
COEFFICIENTS = st.integers(0, 1000)
IN_SEQ = st.tuples(COEFFICIENTS, COEFFICIENTS, *[st.just(0)] * 4)


def test_a_dim_of_one_size() -> None:
    dim = Dim("hidden", 64)
    assert dim.poly == (64, 0, 0, 0, 0, 0)
    assert dim.parts == (dim,)
    assert repr(dim) == "hidden=64"


@given(SIZES, SIZES)
def test_batch_and_seq_are_polynomials_in_themselves(batch: int, seq: int) -> None:
    size = workload_size(batch, seq)
    assert (size.batch.size, size.seq.size) == (batch, seq)
    assert evaluate(size.batch.poly, batch, seq) == batch
    assert evaluate(size.seq.poly, batch, seq) == seq


@given(SIZES, SIZES, st.lists(st.sampled_from(("batch", "hidden", "seq", "heads", "1")), max_size=6, unique=True))
def test_elements_as_number_and_polynomial(batch: int, seq: int, names: list[str]) -> None:
    size = workload_size(batch, seq)
    dims = {"batch": size.batch, "seq": size.seq, "hidden": Dim("hidden", 24), "heads": Dim("heads", 3), "1": ONE_DIM}
    shape = tuple(dims[name] for name in names)
    elements, poly = numel(shape)
    expected = 1
    for dim in shape:
        expected *= dim.size
    assert elements == expected == evaluate(poly, batch, seq)
    merged = merge(*shape) if shape else ONE_DIM
    assert (merged.size, merged.poly) == (elements, poly)
    assert formula(shape) == ("·".join(name for name in names if name != "1") or "1")
    assert evaluate(poly, batch + 1, seq + 2) == numel_at(names, batch + 1, seq + 2)


def numel_at(names: list[str], batch: int, seq: int) -> int:
    sizes = {"batch": batch, "seq": seq, "hidden": 24, "heads": 3, "1": 1}
    out = 1
    for name in names:
        out *= sizes[name]
    return out


@given(IN_SEQ, IN_SEQ, SIZES, SIZES)
def test_multiply_is_the_product(left: tuple[int, ...], right: tuple[int, ...], batch: int, seq: int) -> None:
    product = multiply(left, right)  # type: ignore[arg-type]
    assert evaluate(product, batch, seq) == evaluate(left, batch, seq) * evaluate(right, batch, seq)  # type: ignore[arg-type]
    assert product == multiply(right, left)  # type: ignore[arg-type]


def test_no_tensor_has_batch_squared() -> None:
    size = workload_size(2, 3)
    with pytest.raises(OverflowError, match="batch"):
        numel((size.batch, size.batch))
    with pytest.raises(OverflowError, match="seq"):
        numel((size.seq, size.seq, size.seq))
    assert numel((size.batch, size.seq, size.seq)) == (18, (0, 0, 0, 0, 0, 1))


def test_merged_dims_remember_their_parts() -> None:
    size = workload_size(2, 3)
    hidden = Dim("hidden", 5)
    tokens = merge(size.batch, size.seq)
    assert tokens.name == "batch·seq"
    assert merge(tokens, hidden).parts == (size.batch, size.seq, hidden)
    assert merge(hidden) is hidden
    assert merge(ONE_DIM, ONE_DIM).name == "1"
    assert merge(ONE_DIM, hidden).parts == (hidden,)


@given(SIZES, SIZES, st.integers(0, 9))
def test_plus_pads(batch: int, seq: int, more: int) -> None:
    padded = plus(workload_size(batch, seq).seq, more)
    assert padded.size == seq + more == evaluate(padded.poly, batch, seq)
    assert padded.name == (f"(seq+{more})" if more else "seq")


def test_divided_is_an_equal_part() -> None:
    assert divided(Dim("hidden", 64), 4).size == 16
    assert divided(Dim("hidden", 64), 4).name == "hidden/4"
    for dim in (Dim("hidden", 63), workload_size(1, 64).seq):  # of seq only one length would divide
        with pytest.raises(ValueError, match="is not divisible"):
            divided(dim, 4)


def test_an_empty_shape_is_one_element() -> None:
    assert numel(()) == (1, (1, 0, 0, 0, 0, 0))
    assert formula(()) == "1"
