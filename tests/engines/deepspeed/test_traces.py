"""How many runs on paper a question about DeepSpeed costs, and that those that share one are alike."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.engines.deepspeed import engine as deepspeed
from memcalc.engines.deepspeed.zero3_step import alike_ranks
from memcalc.tape import profile
from memcalc.tape.profile import Choices

DIVIDING = (2, 4, 8, 64, 256)


def peaks(gpus: tuple[int, ...], **options: object) -> list[dict[str, int]]:
    """The phases of each rank count, from one model."""
    model = memcalc.load_model("llama-7b")
    return [dict(memcalc.estimate(model, engine="deepspeed", gpus=n, seq_len=256, **options).phases) for n in gpus]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The runs on paper that are recorded."""
    runs: list[object] = []

    def counted(program: Any, choices: Choices, *given: Any) -> object:
        if choices.hooks is not None:
            runs.append(given)
        return trace(program, choices, *given)

    trace = profile.trace
    monkeypatch.setattr(profile, "trace", counted)
    return runs


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_rank_counts_that_divide_all_sizes_share_a_run_of_zero3(
    recompute: str, made: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = peaks(DIVIDING, zero=3, recompute=recompute)
    assert len(made) == 1
    monkeypatch.setattr(deepspeed, "alike_ranks", lambda _, n: n)
    assert peaks(DIVIDING, zero=3, recompute=recompute) == shared
    assert len(made) == 2


def test_all_rank_counts_and_thresholds_share_a_recorded_run_of_zero3(made: list[object]) -> None:
    model = memcalc.load_model("llama-7b")
    found = {
        (n, live): memcalc.estimate(
            model, engine="deepspeed", gpus=n, zero=3, seq_len=256, max_live_parameters=live
        ).phases["forward"]
        for n in (2, 3, 7, 24)
        for live in (10**7, 10**9)
    }
    assert len(made) == 1
    assert len(set(found.values())) > len(found) // 2


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_all_rank_counts_and_buckets_share_a_run_of_zero2(recompute: str, made: list[object]) -> None:
    model = memcalc.load_model("llama-7b")
    found = {
        (n, bucket): memcalc.estimate(
            model, engine="deepspeed", gpus=n, zero=2, seq_len=256, recompute=recompute, reduce_bucket_size=bucket
        ).phases["backward"]
        for n in (2, 3, 5, 8, 24, 256)
        for bucket in (10**6, 5 * 10**8)
    }
    assert len(made) == 1
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize(
    ("sizes", "of", "alike"),
    [((12, 18), 6, 2), ((12, 18), 3, 2), ((15, 9), 3, 3), ((12, 18), 4, 4), ((12, 18), 1, 1), ((7, 11), 5, 5)],
)
def test_ranks_are_alike_where_they_divide_every_size(sizes: tuple[int, ...], of: int, alike: int) -> None:
    assert alike_ranks(sizes, of) == alike
