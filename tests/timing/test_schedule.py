"""A pipeline's time: the schedule played, against the published bubbles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.setup.setup import Setup
from memcalc.timing.schedule import Turn, seconds_of_passes

BASE = memcalc.estimate("gpt2").setup


def setup_of(pp: int, micro_batches: int, schedule: str = "1f1b", chunks: int = 1, engine: str = "megatron") -> Setup:
    return BASE._replace(
        pp=pp, dp=1, global_batch_size=micro_batches, schedule=schedule, virtual_stages=chunks, engine=engine
    )


def equal(pp: int, micro_batches: int, schedule: str = "1f1b", chunks: int = 1, engine: str = "megatron") -> float:
    """The idle time over the ideal time, if all stages take equally long: backward twice as long as forward."""
    turns = [[Turn(1 / chunks, 2 / chunks)] * chunks for _ in range(pp)]
    found = seconds_of_passes(setup_of(pp, micro_batches, schedule, chunks, engine), turns)
    return found / (3 * micro_batches) - 1


@given(st.integers(2, 8), st.integers(1, 40))
def test_1f1b_waits_p_minus_1_over_m(pp: int, micro_batches: int) -> None:
    """Narayanan et al. 2021, arXiv 2104.04473, section 2.2."""
    assert equal(pp, micro_batches) == pytest.approx((pp - 1) / micro_batches, rel=1e-9)


@given(st.integers(2, 6), st.integers(1, 6), st.integers(2, 4))
def test_interleaved_waits_less_by_the_chunks(pp: int, rounds: int, chunks: int) -> None:
    assert equal(pp, rounds * pp, "interleaved", chunks) == pytest.approx((pp - 1) / (rounds * pp * chunks), rel=1e-9)


def test_gpipe_waits_as_1f1b() -> None:
    assert equal(4, 8, "gpipe") == pytest.approx(3 / 8, rel=1e-9)


def test_zero_bubble_waits_a_third() -> None:
    """Qi et al. 2023, arXiv 2401.10241: (p-1)/(3m) where the halves of a backward take as long as a forward."""
    assert equal(4, 12, "zero-bubble", engine="fsdp2") == pytest.approx(3 / (3 * 12), rel=1e-9)


def test_the_slowest_stage_paces_the_others() -> None:
    """Stage 1 takes 2 + 4 seconds, the others 1 + 2. It begins after 1 s, waits 1 s for stage 2's first backward, and stage 0
    ends 2 s after it."""
    turns = [[Turn(1, 2)], [Turn(2, 4)], [Turn(1, 2)]]
    assert seconds_of_passes(setup_of(3, 50), turns) == pytest.approx(1 + 50 * 6 + 1 + 2, rel=1e-9)


@given(st.integers(2, 5), st.integers(16, 60))
def test_many_micro_batches_are_not_played_one_by_one(pp: int, micro_batches: int) -> None:
    """Each further one takes as long as the busiest rank computes for it."""
    turns = [[Turn(1 + rank / 7, 2 + rank / 3)] for rank in range(pp)]
    more = seconds_of_passes(setup_of(pp, micro_batches + 1), turns) - seconds_of_passes(
        setup_of(pp, micro_batches), turns
    )
    assert more == pytest.approx(sum(turns[-1][0]), rel=1e-9)
