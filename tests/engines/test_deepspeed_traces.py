"""How many runs on paper a question about DeepSpeed costs, and that those that share one are alike."""

from __future__ import annotations

import pytest

import memcalc
from memcalc import ranks
from memcalc.engines import deepspeed
from memcalc.engines.zero3_step import alike_ranks

DIVIDING = (2, 4, 8, 64, 256)


def peaks(gpus: tuple[int, ...], **options: object) -> list[dict[str, int]]:
    """The phases of each rank count, from one model."""
    model = memcalc.load_model("llama-7b")
    return [dict(memcalc.estimate(model, engine="deepspeed", gpus=n, seq_len=256, **options).phases) for n in gpus]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_rank_counts_that_divide_all_sizes_share_a_run_of_zero3(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def counted(*given: object) -> object:
        made.append(given)
        return profile(*given)

    profile = ranks.profile
    monkeypatch.setattr(ranks, "profile", counted)
    shared = peaks(DIVIDING, zero=3, recompute=recompute)
    assert len(made) == 1
    monkeypatch.setattr(deepspeed, "alike_ranks", lambda _, n: n)
    assert peaks(DIVIDING, zero=3, recompute=recompute) == shared
    assert len(made) == 1 + len(DIVIDING)


@pytest.mark.parametrize(
    ("sizes", "of", "alike"),
    [((12, 18), 6, 2), ((12, 18), 3, 2), ((15, 9), 3, 3), ((12, 18), 4, 4), ((12, 18), 1, 1), ((7, 11), 5, 5)],
)
def test_ranks_are_alike_where_they_divide_every_size(sizes: tuple[int, ...], of: int, alike: int) -> None:
    assert alike_ranks(sizes, of) == alike
