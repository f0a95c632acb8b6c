"""Refusals of `memcalc.plan`, each in one line, and targets."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.planning.printed import show_days

ASKED: dict[str, Any] = {"gpu": "h100-80gb", "gpus": 4, "global_batch_size": 16, "seq_len": 1024, "engine": "megatron"}


@pytest.mark.parametrize(
    ("days", "shown"), [(0.15, "3.6 hours"), (1.9, "45.6 hours"), (2, "2 days"), (298.4, "298 days")]
)
def test_a_short_training_takes_hours(days: float, shown: str) -> None:
    assert show_days(days) == shown


def test_times_that_would_differ_by_nothing_are_told_as_equal() -> None:
    """On one GPU ZeRO's stages only differ by their buffers, as far as a step of this model shows."""
    found = memcalc.plan("gpt2", gpu="h100-80gb", gpus=1, global_batch_size=8, seq_len=1024, engine="deepspeed", top=2)
    one, two = found.plans
    same = abs(two.seconds - one.seconds) < 5e-4 * two.seconds
    assert (f"as long as number {two.rank}'s" in one.why) is same
    assert "(0.0%)" not in one.why


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"days": 3}, "--days 3: needs --tokens"),
        ({"tokens": "1B", "budget": 3}, "--budget 3: needs --price"),
        ({"price": 1, "budget": 3}, "--budget 3: needs --tokens"),
        ({"objective": "cost"}, "--objective cost: needs --price"),
        ({"objective": "fun"}, "allowed: time, cost, gpus"),
        ({"tokens": "many"}, "--tokens many: allowed: a whole number"),
        ({"tokens": "1B", "days": -1}, "--days -1: allowed: a number above 0"),
        ({"budget": -3}, "--budget -3: allowed: a number above 0"),  # before what it needs
        ({"budget": "free", "global_batch_size": None}, "--budget free: allowed: a number above 0"),
        ({"days": 0}, "--days 0: allowed: a number above 0"),
        ({"days": 0.5}, "--days 0.5: needs --tokens"),
        ({"price": "a100-80gb=2"}, "has none for h100-80gb"),
        ({"gpus": "8..4"}, "--gpus 8..4: allowed"),
        ({"gpus": "some"}, "--gpus some: allowed"),
        ({"gpu": "h1000"}, "h1000"),
        ({"gpu": None}, "--gpu: is needed"),
        ({"tp": 3}, "is not divisible by tp 3"),
        ({"gpus": 5, "tp": 2}, "is not divisible by tp 2"),
        ({"global_batch_size": 3, "tp": 1, "pp": 1, "cp": 1}, "--global-batch-size 3: none of"),
        ({"global_batch_size": None}, "--global-batch-size: is needed"),
        ({"max_xp": 3}, "--max-xp: unknown option"),
        ({"max_tp": 0}, "--max-tp 0: allowed"),
        ({"top": 0}, "--top 0: allowed"),
        ({"jobs": 0}, "--jobs 0: allowed"),
        ({"dp": 2}, "--dp 2: the search decides it"),
        ({"zzz": 2}, "--zzz: unknown option"),
        ({"engine": "data-parallel"}, "or memcalc estimate --engine data-parallel"),
        ({"engine": "parameter-server"}, "allowed: --engine none, ddp, deepspeed, fsdp2, megatron, fsdp1, or"),
        ({"engine": "colossalai"}, "--engine colossalai: memcalc plan has no bounds for this engine's layouts"),
        ({"engine": None, "tp_dims": "2"}, "or memcalc estimate --tp-dims 2"),
    ],
)
def test_bad_input_is_one_line(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.plan("gpt2", **{**ASKED, **changed})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_costs_are_hours_times_price() -> None:
    found = memcalc.plan("gpt2", **ASKED, tokens=10**9, price=2.5)
    for one in found.plans:
        seconds = 10**9 / one.document["time"]["tokens_per_second"]
        assert one.gpu_hours == pytest.approx(4 * seconds / 3600)
        assert one.cost == pytest.approx(2.5 * one.gpu_hours)


def test_the_fewest_gpus_in_time() -> None:
    asked = {**ASKED, "gpus": "1..4", "max_micro_batch_size": 4}
    day = 86400
    alone = memcalc.plan("gpt2", **{**asked, "gpus": 1}, top=1).plans[0].document["time"]["tokens_per_second"]
    found = memcalc.plan("gpt2", **asked, tokens=int(alone * day * 1.5), days=1)
    assert found.target.objective == "gpus"
    assert found.plans[0].layout.gpus == 2
    assert all(one.days is not None and one.days <= 1 for one in found.plans)
    assert found.to_dict()["layouts"]["misses_target"] > 0


def test_missing_the_target_is_not_too_large() -> None:
    found = memcalc.plan("gpt2", **ASKED, tokens="15T", days=1)
    assert not found.fits
    assert found.no_fit is None
    assert found.best_missing is not None
    assert found.best_missing.days is not None
    assert found.best_missing.days > 1


def test_a_limit_narrows_the_search() -> None:
    found = memcalc.plan("gpt2", **ASKED, max_pp=1, max_cp=1, top=50)
    assert {(one.layout.pp, one.layout.cp) for one in found.plans} == {(1, 1)}
    assert {one.layout.tp for one in found.plans} >= {1, 2}


@pytest.mark.slow
def test_a_given_option_is_fixed() -> None:
    found = memcalc.plan("gpt2", **ASKED, pp=2, recompute="full", top=50)
    assert {(one.layout.pp, one.layout.recompute) for one in found.plans} == {(2, "full")}
