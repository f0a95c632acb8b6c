"""The boundary of a row of values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memcalc.decisions.boundary import beyond, last_enough


@given(st.integers(1, 5000), st.integers(0, 6000), st.integers(0, 500))
def test_the_last_one_is_found_with_few_questions(count: int, limit: int, more: int) -> None:
    asked: list[int] = []

    def enough(place: int) -> bool:
        assert 0 <= place < count
        asked.append(place)
        return place < limit

    found = last_enough(count, lambda place: place < limit + more, enough)
    assert found == (None if not limit else min(limit, count) - 1)
    assert len(asked) <= 2 * count.bit_length() + 3


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_the_place_is_a_boundary_whatever_the_order(row: list[tuple[bool, bool]]) -> None:
    good = [possible and enough for possible, enough in row]
    place = last_enough(len(row), lambda place: row[place][0], good.__getitem__)
    if place is not None:
        assert good[place]
        assert place == len(row) - 1 or not good[place + 1]
    else:
        assert not good[0]


def test_no_values_have_no_boundary() -> None:
    assert last_enough(0, bool, bool) is None


@given(st.integers(-1, 50), st.integers(1, 400))
def test_places_beyond_are_behind_the_next_one_and_exist(place: int, count: int) -> None:
    places = beyond(place, count)
    assert all(place + 1 < other < count for other in places)
    assert places == sorted(set(places))
