"""Columns of a drawing: all moments are in them, and spans keep some width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictured import SETUPS, pictured

from memcalc.pictures.columns import columns_of
from memcalc.pictures.timeline import Span, Timeline


def timeline(lengths: list[int]) -> Timeline:
    """A timeline of spans of these lengths."""
    spans: list[Span] = []
    for i, length in enumerate(lengths):
        first = spans[-1].last if spans else 0
        spans.append(Span("forward", i, 0, None, first, first + length))
    return Timeline((), tuple(spans), (), (), sum(lengths), 0, 0, None, 0)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(50, 190))
def test_every_moment_has_a_column(lengths: list[int], count: int) -> None:
    one = timeline(lengths)
    columns = columns_of(one, count)
    assert len(columns.moments) == count
    assert columns.moments[0].start == 0
    assert {moment for moments in columns.moments for moment in moments} == set(range(one.events + 1))
    ends = [0, *(end for _, _, end in columns.spans)]
    assert all(first >= before and end > first for before, (_, first, end) in zip(ends, columns.spans, strict=False))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12))
def test_a_short_span_is_seen(lengths: list[int]) -> None:
    columns = columns_of(timeline(lengths), 50)
    assert len(columns.spans) == len(lengths)
    assert all(end - first >= 4 for _, first, end in columns.spans)


def test_more_spans_than_columns_are_sections() -> None:
    one = timeline([10] * 80)
    kinds = ["forward"] * 20 + ["forward", "backward"] * 20 + ["backward"] * 19 + ["step"]
    spans = tuple(span._replace(phase=kind) for span, kind in zip(one.spans, kinds, strict=True))
    found = columns_of(one._replace(spans=spans), 80).spans
    assert [span.phase for span, _, _ in found] == ["forwards", "forwards and backwards", "backwards", "step"]
    assert [span.first for span, _, _ in found] == [0, 210, 590, 790]


@pytest.mark.parametrize("name", SETUPS)
def test_the_peak_is_in_its_column(name: str) -> None:
    _, one = pictured(name)
    columns = columns_of(one, 80)
    assert one.peak_event in columns.moments[columns.of(one.peak_event)]
