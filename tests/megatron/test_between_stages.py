"""Hidden states and gradients between stages, against Megatron-Core's own schedules on a fake process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_schedule_oracle import Moment, moments

import memcalc
from memcalc.megatron import schedules
from memcalc.megatron.between_stages import between, left
from memcalc.megatron.schedules import states

CASES = [
    pytest.param(2, 4, 1, id="2 stages"),
    pytest.param(3, 2, 1, id="fewer micro-batches than stages"),
    pytest.param(4, 6, 1, id="4 stages"),
    pytest.param(2, 4, 2, id="2 stages of 2 chunks"),
    pytest.param(2, 2, 3, id="all forwards first"),
    pytest.param(4, 8, 3, id="4 stages of 3 chunks"),
]


def besides(seen: Iterable[Moment]) -> list[int]:
    """Less the inputs of what is in flight, that of what runs, and in backward the gradient that came in."""
    live: Counter[int] = Counter()
    out: list[int] = []
    for moment in seen:
        if moment.kind == "backward":
            live[moment.chunk] -= 1
        out.append(moment.alive - sum(live.values()) - 1 - (moment.kind == "backward"))
        if moment.kind == "forward":
            live[moment.chunk] += 1
    return out


@pytest.mark.parametrize(("ranks", "micro_batches", "chunks"), CASES)
def test_every_moment_of_every_rank(ranks: int, micro_batches: int, chunks: int) -> None:
    schedule = "1f1b" if chunks == 1 else "interleaved"
    for rank in range(ranks):
        remaining, seen = moments(rank, ranks, micro_batches, chunks)
        order = list(schedules.actions(schedule, rank, ranks, micro_batches, chunks))
        assert order == [(moment.kind, moment.chunk) for moment in seen]
        warmup = schedules.warmup_of(schedule, rank, ranks, micro_batches, chunks)
        assert list(between(order, warmup, rank, ranks, chunks)) == besides(seen)
        assert left(rank, chunks) == remaining


@given(ranks=st.integers(2, 6), chunks=st.integers(1, 4), groups=st.integers(1, 7))
def test_states_repeat(ranks: int, chunks: int, groups: int) -> None:
    """So many micro-batches as `states` looks at show all there are."""
    schedule = "1f1b" if chunks == 1 else "interleaved"
    for rank in range(ranks):
        shown = set(states(schedule, rank, ranks, groups * ranks, chunks))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(schedules, "_ENOUGH", groups)
            assert set(states(schedule, rank, ranks, groups * ranks, chunks)) == shown


def test_what_is_left_is_there_between_steps() -> None:
    """The first chunk of the first rank embeds tokens, all others have an input."""
    layout = {"gpus": 2, "pp": 2, "virtual_stages": 2, "schedule": "interleaved", "global_batch_size": 4}
    for rank, tensors in ((0, 2), (1, 4)):
        report = memcalc.estimate("llama-7b", **layout, pp_rank=rank, seq_len=512)
        (row,) = (row for row in report.rows_at("step") if "between stages" in row.name)
        assert row.bytes_at(1, 512) == tensors * 512 * 4096 * 2
