"""How little an allocator can work with: what holds whatever the setup is."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.device.allocator import CachingAllocator, OutOfMemory
from memcalc.device.expandable import ExpandableAllocator
from memcalc.device.least import least
from memcalc.device.replay import MOST_STEPS_WHEN_FULL, prepared, replayed
from memcalc.device.shown import Workspaces
from memcalc.units import MIB

NONE = Workspaces((), ())
KINDS = pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])
FSDP: dict[str, Any] = {"engine": "fsdp2", "gpus": 8, "zero": 3}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}),
    ("gpt2", {"micro_batch_size": 3, "optimizer_implementation": "for-loop"}),
    ("llama-3.2-1b", {**FSDP, "recompute": "full"}),
    ("llama-3.2-1b", {**FSDP, "zero": 2, "precision": "bf16", "global_batch_size": 16}),
    ("llama-3.2-1b", {"gpus": 8, "zero": 2}),
    ("llama-3.2-1b", {"gpus": 8, "zero": 3, "recompute": "full"}),
    ("llama-3.2-1b", {"gpus": 8, "pp": 4, "zero": 1, "global_batch_size": 16, "pp_rank": 1}),
]


class Counted(CachingAllocator):
    """Counts its kind."""

    made = 0

    def __init__(self, limit: int | None = None) -> None:
        Counted.made += 1
        super().__init__(limit)


@KINDS
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_with_that_a_run_goes_on_and_below_it_fails(
    name: str, options: dict[str, Any], kind: type[CachingAllocator]
) -> None:
    report = memcalc.estimate(name, **options)
    found = least(report.rank, report.setup, NONE, kind)
    free = replayed(report.rank, report.setup, kind(), NONE)
    assert found is not None and free is not None
    assert free.allocated <= found.limit <= free.reserved + 2 * MIB
    assert found.limit % (2 * MIB) == 0
    assert replayed(report.rank, report.setup, kind(found.limit), NONE) == found.run
    assert found.run.reserved <= found.limit
    assert found.run.steps <= MOST_STEPS_WHEN_FULL + (report.rank.untraced is not None)
    if found.below:
        assert found.limit - found.below <= max(2 * MIB, free.reserved // 256 + 2 * MIB)
        with pytest.raises(OutOfMemory):
            replayed(report.rank, report.setup, kind(found.below), NONE)


def test_what_a_run_has_to_give_back_is_told_of_the_last_step() -> None:
    """With a segment less than it would reserve; with room nothing is given back."""
    report = memcalc.estimate("llama-3.2-1b", **FSDP)
    free = replayed(report.rank, report.setup, CachingAllocator(), NONE)
    assert free is not None and (free.retries, free.retried) == (0, 0)
    found = least(report.rank, report.setup, NONE)
    assert found is not None
    assert 0 < found.run.retried < found.run.retries


def test_a_run_is_played_a_bounded_number_of_times() -> None:
    """Once with room, then halving what 1/256 of it is to be found in."""
    report = memcalc.estimate("gpt2", seq_len=512)
    Counted.made = 0
    found = least(report.rank, report.setup, NONE, Counted)
    assert found == least(report.rank, report.setup, NONE)
    assert 1 < Counted.made <= 10


def test_a_prepared_run_is_the_same_every_time() -> None:
    report = memcalc.estimate("llama-3.2-1b", gpus=8, zero=2)
    run = prepared(report.rank, report.setup)
    assert run is not None
    first, second = (run.play(CachingAllocator(), NONE) for _ in range(2))
    assert first == second == replayed(report.rank, report.setup, CachingAllocator(), NONE)


def test_where_the_order_is_not_known_nothing_is() -> None:
    report = memcalc.estimate("llama-3-8b", gpus=8, engine="deepspeed", optimizer="lion")
    assert least(report.rank, report.setup, NONE) is None


def test_expandable_segments_need_little_more_than_what_is_allocated() -> None:
    """Pages that are free in the middle go back to the device, which whole segments seldom are."""
    report = memcalc.estimate("llama-3.2-1b", **FSDP)
    whole, pages = (least(report.rank, report.setup, NONE, kind) for kind in (CachingAllocator, ExpandableAllocator))
    assert whole is not None and pages is not None
    assert pages.limit < whole.limit
    assert pages.limit < 1.05 * pages.run.allocated


@pytest.mark.parametrize("optimizer", ["lion", "sgd", "sgd-momentum"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2-large", {"micro_batch_size": 4}),
        ("llama-3.2-1b", {"gpus": 8}),
        ("llama-3.2-1b", FSDP),
        ("llama-3-8b", {**FSDP, "recompute": "full", "seq_len": 8192}),
    ],
    ids=str,
)
def test_with_smaller_states_no_more_is_reserved_than_with_adamw(
    name: str, options: dict[str, Any], optimizer: str
) -> None:
    """Though it can be a larger share of what is allocated, and more bytes beyond it: forward and backward are the same, and
    reserve what they need."""
    report, adamw = (memcalc.estimate(name, **options, optimizer=one) for one in (optimizer, "adamw"))
    runs = [replayed(one.rank, one.setup, CachingAllocator(), NONE) for one in (report, adamw)]
    assert all(run is not None for run in runs)
    small, large = (run for run in runs if run is not None)
    assert small.allocated < large.allocated
    assert small.reserved <= large.reserved
