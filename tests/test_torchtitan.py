"""torchtitan's published memory: its own model under FSDP2, and the estimate of transformers' with the same sizes."""

from __future__ import annotations

from functools import cache

import pytest
from caching_allocator import MIB, Block, CachingAllocator
from published_runs import RESERVED_RUNS, ReservedRun
from torchtitan_oracle import Event, Sizes, Steps, two_steps

GIB = 2**30
CUBLAS_WORKSPACE = 32 * MIB  # sm_90


def reserved(events: list[Event]) -> int:
    """What the caching allocator holds after these allocations and frees."""
    allocator = CachingAllocator()
    allocator.allocate(CUBLAS_WORKSPACE, "default")
    live: dict[int, Block] = {}
    for storage, nbytes, stream in events:
        if nbytes:
            live[storage] = allocator.allocate(nbytes, stream)
        else:
            allocator.release(live.pop(storage))
    return allocator.reserved


@cache
def torchtitans(run: ReservedRun) -> Steps:
    return two_steps(run.options["gpus"], 2, 8192, Sizes())


@pytest.mark.parametrize("run", RESERVED_RUNS, ids=lambda run: run.name)
def test_a_published_run(run: ReservedRun) -> None:
    """The peak of torchtitan's model is the estimate's, and the allocator holds for it what was published."""
    real, report = torchtitans(run), run.estimate()
    assert abs(report.phases["forward"] - real.forward) < 0.01 * GIB
    assert abs(report.phases["backward"] - real.backward) < 0.01 * GIB
    assert round(real.backward / GIB, 2) == run.traced
    assert round(reserved(real.events) / GIB, 2) == run.replayed
    assert abs(run.replayed / run.reserved - 1) < 0.01


# --- the allocator's rules


def test_segments() -> None:
    sizes = (1, MIB, MIB + 1, 9 * MIB, 10 * MIB, 11 * MIB)
    reserved_for = []
    for size in sizes:
        allocator = CachingAllocator()
        allocator.allocate(size, "default")
        reserved_for.append(allocator.reserved // MIB)
    assert reserved_for == [2, 2, 20, 20, 10, 12]


def test_a_free_block_is_taken_by_its_stream_alone() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(50 * MIB, "default"))
    allocator.allocate(30 * MIB, "default")
    assert allocator.reserved == 50 * MIB
    allocator.allocate(20 * MIB, "gather")
    assert allocator.reserved == 70 * MIB
    allocator.allocate(20 * MIB, "default")  # what the first one left
    assert allocator.reserved == 70 * MIB


def test_neighbours_become_one_and_segments_do_not() -> None:
    allocator = CachingAllocator()
    whole = allocator.allocate(60 * MIB, "default")
    allocator.release(whole)
    parts = [allocator.allocate(20 * MIB, "default") for _ in range(3)]
    for part in (parts[0], parts[2], parts[1]):
        allocator.release(part)
    allocator.allocate(60 * MIB, "default")
    assert allocator.reserved == 60 * MIB
    other = allocator.allocate(60 * MIB, "default")
    allocator.release(other)
    allocator.allocate(61 * MIB, "default")
    assert allocator.reserved == (60 + 60 + 62) * MIB


def test_what_is_left_of_a_large_block_is_split_off_above_a_mebibyte() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(20 * MIB, "default"))
    assert allocator.allocate(19 * MIB, "default").size == 20 * MIB
    other = CachingAllocator()
    other.release(other.allocate(20 * MIB, "default"))
    assert other.allocate(19 * MIB - 512, "default").size == 19 * MIB - 512
