"""Schedules against the published numbers of micro-batches in flight, and against what every schedule has to do."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.megatron.schedules import _order, bubble, layers_of_chunks, spans_of, states


@given(ranks=st.integers(1, 8), micro_batches=st.integers(1, 20))
def test_one_forward_one_backward_has_p_minus_r_in_flight(ranks: int, micro_batches: int) -> None:
    for rank in range(ranks):
        most = max(sum(state.in_flight) for state in states("1f1b", rank, ranks, micro_batches))
        assert most + 1 == min(micro_batches, ranks - rank)
        assert max(sum(s.in_flight) for s in states("gpipe", rank, ranks, micro_batches)) + 1 == micro_batches


@given(ranks=st.integers(2, 8), groups=st.integers(1, 4), chunks=st.integers(2, 4))
def test_interleaved_chunks_in_flight(ranks: int, groups: int, chunks: int) -> None:
    """min(vm, 2(p-r-1) + (v-1)p + 1) chunks (megatron/core/pipeline_parallel/schedules.py)."""
    m = groups * ranks
    for rank in range(ranks):
        most = max(sum(state.in_flight) for state in states("interleaved", rank, ranks, m, chunks))
        assert most + 1 == min(chunks * m, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@given(ranks=st.integers(2, 6), groups=st.integers(1, 3), chunks=st.integers(2, 3))
def test_every_forward_has_its_backward_after_it(schedule: str, ranks: int, groups: int, chunks: int) -> None:
    chunks = chunks if schedule == "interleaved" else 1
    for rank in range(ranks):
        live: Counter[int] = Counter()
        done: Counter[str] = Counter()
        for kind, chunk in _order(schedule, rank, ranks, groups * ranks, chunks):
            live[chunk] += 1 if kind == "forward" else -1
            assert live[chunk] >= 0
            done[kind] += 1
        assert done == {"forward": groups * ranks * chunks, "backward": groups * ranks * chunks}


def test_bubbles() -> None:
    """Narayanan et al. 2021 (arXiv 2104.04473), section 2.2."""
    assert bubble("1f1b", 8, 64) == bubble("gpipe", 8, 64) == 7 / 64
    assert bubble("interleaved", 8, 64, 3) == 7 / (3 * 64)


def test_layers_are_spread_evenly_or_not_at_all() -> None:
    assert layers_of_chunks(12, 6) == [2] * 6
    assert layers_of_chunks(126, 16) == [7, *[8] * 14, 7]  # Llama 3 405B, with the embedding and the head
    assert layers_of_chunks(31, 4) == [8, 8, 8, 7]
    assert layers_of_chunks(61, 16, last=1) == [*[4] * 15, 1]
    assert layers_of_chunks(10, 2, 4, 6) == [4, 6]
    with pytest.raises(ValueError, match="12 layers less 5 do not divide by 2"):
        layers_of_chunks(12, 3, first=5)
    with pytest.raises(ValueError, match=r"12 layers, .* do not divide by 8"):
        layers_of_chunks(12, 8)


def test_chunks_go_round() -> None:
    spans = spans_of(12, 2, 3)
    assert [[span.start for span in of_rank] for of_rank in spans] == [[0, 4, 8], [2, 6, 10]]
    assert [span.first for of_rank in spans for span in of_rank] == [True, *[False] * 5]
    assert [span.last for of_rank in spans for span in of_rank] == [*[False] * 5, True]
