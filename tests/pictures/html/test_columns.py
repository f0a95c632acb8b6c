"""Columns of the timeline: every local maximum is kept, and the bytes by name are those of the blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.pictures.html.columns import ALLOCATOR, OTHERS, Key, changes, columns_of, with_small_ones_together
from memcalc.pictures.timeline import Block, Timeline, timeline_of


def block(name: str, nbytes: int, begin: int, end: int | None, component: str = "temporaries", more: int = 0) -> Block:
    return Block(name, component, nbytes, nbytes + more, begin, end, "compute", 0, None, "forward")


def timeline(blocks: list[Block], events: int) -> Timeline:
    made = Timeline(tuple(blocks), (), (), (), events, 0, 0, None, 0)
    totals = made.allocated()
    return made._replace(peak=max(totals), peak_event=totals.index(max(totals)))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    events = draw(st.integers(1, 60))
    blocks: list[Block] = []
    for i in range(draw(st.integers(1, 20))):
        begin = draw(st.integers(0, events))
        end = draw(st.one_of(st.none(), st.integers(begin, events)))
        name = draw(st.sampled_from(["a", "layers.3.b", "layers.4.b"]))
        blocks.append(
            block(name, draw(st.integers(1, 9)), begin, end, draw(st.sampled_from(["buffers", "temporaries"])), i % 2)
        )
    return timeline(blocks, events)


@given(timelines(), st.integers(1, 70))
def test_each_column_has_the_fullest_of_its_moments(made: Timeline, most: int) -> None:
    totals = made.allocated()
    moments = columns_of(made, most)
    assert moments == sorted(set(moments))
    assert len(moments) == min(most, len(totals))
    assert made.peak_event in moments
    borders = [i * len(totals) // len(moments) for i in range(len(moments) + 1)]
    for moment, first, end in zip(moments, borders, borders[1:], strict=False):
        assert first <= moment < end
        assert totals[moment] == max(totals[first:end])


@given(timelines(), st.integers(1, 70), st.integers(0, 20))
def test_the_bytes_by_name_are_those_of_the_blocks(made: Timeline, most: int, least: int) -> None:
    moments = columns_of(made, most)
    every = changes(made.blocks, moments)
    fewer = changes(made.blocks, moments, with_small_ones_together(every, least))
    for column, moment in enumerate(moments):
        alive: Counter[Key] = Counter()
        for one in made.alive_at(moment):
            alive[Key(one.component, one.name.replace(".3.", ".*.").replace(".4.", ".*."))] += one.nbytes
        own = Counter({found.key: found.at(column) for found in every if found.key.component != ALLOCATOR})
        assert +own == +alive
        assert sum(found.at(column) for found in every) == made.allocated()[moment]
        assert sum(found.at(column) for found in fewer) == made.allocated()[moment]


def test_small_names_are_put_together_by_component() -> None:
    made = timeline([block("a", 9, 0, 2), block("b", 2, 0, 2), block("c", 3, 1, 2), block("d", 1, 0, 2, "buffers")], 3)
    moments = columns_of(made)
    fewer = changes(made.blocks, moments, with_small_ones_together(changes(made.blocks, moments), 4))
    assert {found.key: [found.at(column) for column in range(4)] for found in fewer} == {
        Key("temporaries", "a"): [9, 9, 0, 0],
        Key("temporaries", OTHERS): [2, 5, 0, 0],
        Key("buffers", OTHERS): [1, 1, 0, 0],
    }


@pytest.mark.parametrize("options", [{}, {"zero": 3, "gpus": 8}, {"engine": "megatron", "gpus": 4, "pp": 4}])
def test_a_real_step(options: dict[str, object]) -> None:
    made = timeline_of(memcalc.estimate("gpt2", **options))  # type: ignore[arg-type]
    moments = columns_of(made)
    found = changes(made.blocks, moments)
    column = moments.index(made.peak_event)
    assert len(moments) == min(1500, made.events + 1)
    assert sum(own.at(column) for own in found) == made.peak
    assert max(sum(own.at(c) for own in found) for c in range(0, len(moments), 97)) <= made.peak
