"""The rules of torch's caching allocator, one by one, and what holds whatever is asked of it."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import examples

from memcalc.device.allocator import (
    BLOCK,
    LARGE_SEGMENT,
    OWN_SEGMENT,
    ROUNDING,
    SMALL,
    SMALL_SEGMENT,
    Block,
    CachingAllocator,
    OutOfMemory,
    rounded,
    segment_size,
)
from memcalc.device.expandable import ExpandableAllocator, Unmapped
from memcalc.units import MIB

BOTH = pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])


def test_sizes_are_those_of_torchs_headers() -> None:
    header = (Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h").read_text()
    constants = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", header))
    (large,) = re.findall(r"large_segment_size_\{(\d+)\}", header)
    ours = {"kSmallBuffer": SMALL_SEGMENT, "kMinBlockSize": BLOCK, "kSmallSize": SMALL, "kMinLargeAlloc": OWN_SEGMENT,
            "kRoundLarge": ROUNDING}  # fmt: skip
    assert {name: int(value) for name, value in constants.items()} == ours
    assert int(large) == LARGE_SEGMENT


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (9 * MIB, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (11 * MIB, 12),
        (12 * MIB + 1, 14),
    ],
)
def test_segments(nbytes: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(nbytes, "default")
    assert allocator.reserved == segment * MIB


@BOTH
@pytest.mark.parametrize(("nbytes", "block"), [(0, 512), (1, 512), (512, 512), (513, 1024), (MIB - 1, MIB)])
def test_requests_are_rounded_to_512_bytes(kind: type[CachingAllocator], nbytes: int, block: int) -> None:
    allocator = kind()
    assert allocator.allocate(nbytes, "default").size == block == allocator.allocated


@BOTH
def test_a_free_block_is_taken_by_its_stream_alone(kind: type[CachingAllocator]) -> None:
    allocator = kind()
    allocator.release(allocator.allocate(60 * MIB, "default"))
    allocator.allocate(30 * MIB, "default")
    assert allocator.reserved == 60 * MIB
    allocator.allocate(20 * MIB, "gather")
    assert allocator.reserved == 80 * MIB
    allocator.allocate(20 * MIB, "default")  # what the first one left
    assert allocator.reserved == 80 * MIB


@BOTH
def test_small_and_large_blocks_are_apart(kind: type[CachingAllocator]) -> None:
    allocator = kind()
    allocator.release(allocator.allocate(20 * MIB, "default"))
    allocator.allocate(MIB, "default")
    assert allocator.reserved == 22 * MIB


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


def test_the_smallest_that_fits_is_taken_and_the_lowest_of_equal_ones() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB, "default") for size in (40, 30, 30, 20)]
    addresses = [block.address for block in blocks]
    for block in reversed(blocks):
        allocator.release(block)
    assert addresses == sorted(addresses, reverse=True)  # a new segment lies below the others
    assert allocator.allocate(29 * MIB + 1, "default").address == addresses[2]
    assert allocator.allocate(29 * MIB + 1, "default").address == addresses[1]
    assert allocator.allocate(29 * MIB + 1, "default").address == addresses[0]


def test_what_is_left_of_a_large_block_is_split_off_above_a_mebibyte() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(20 * MIB, "default"))
    assert allocator.allocate(19 * MIB, "default").size == 20 * MIB
    other = CachingAllocator()
    other.release(other.allocate(20 * MIB, "default"))
    assert other.allocate(19 * MIB - 512, "default").size == 19 * MIB - 512


def test_of_an_expandable_segment_from_512_bytes_up() -> None:
    allocator = ExpandableAllocator()
    allocator.release(allocator.allocate(20 * MIB, "default"))
    assert allocator.allocate(20 * MIB - 512, "default").size == 20 * MIB - 512


def test_an_expandable_segment_grows_behind_its_last_free_block() -> None:
    allocator = ExpandableAllocator()
    first = allocator.allocate(30 * MIB, "default")
    assert allocator.reserved == 40 * MIB
    second = allocator.allocate(25 * MIB, "default")  # 10 MiB are there
    assert (second.address, allocator.reserved) == (30 * MIB, 60 * MIB)
    allocator.release(first)
    allocator.release(second)
    third = allocator.allocate(61 * MIB, "default")
    assert (third.address, allocator.reserved) == (0, 80 * MIB)


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    allocator = ExpandableAllocator()
    first, _ = allocator.allocate(30 * MIB, "default"), allocator.allocate(5 * MIB, "default")
    allocator.release(first)  # 30 MiB in front, 5 MiB at the end
    assert allocator.allocate(4 * MIB, "default").address == 0
    assert allocator.allocate(26 * MIB, "default").address == 4 * MIB
    assert allocator.allocate(4 * MIB, "default").address == 35 * MIB
    assert allocator.reserved == 40 * MIB


def test_whole_free_segments_are_given_back_where_the_device_is_full() -> None:
    allocator = CachingAllocator(100 * MIB)
    first, second = allocator.allocate(60 * MIB, "default"), allocator.allocate(30 * MIB, "other")
    allocator.release(first)
    allocator.allocate(70 * MIB, "default")
    assert (allocator.reserved, allocator.most_reserved, allocator.retries) == (100 * MIB, 100 * MIB, 1)
    allocator.release(second)
    part = allocator.allocate(2 * MIB, "other")  # of the 30: its segment is not free as a whole
    with pytest.raises(OutOfMemory):
        allocator.allocate(20 * MIB, "default")
    allocator.release(part)
    allocator.allocate(20 * MIB, "default")
    assert (allocator.reserved, allocator.retries) == (90 * MIB, 3)


_SIZES = st.one_of(st.integers(0, 4000), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB))
_ASKED = st.lists(st.tuples(_SIZES, st.sampled_from("ab"), st.integers(0, 40)), max_size=60)


def blocks_of(block: Block) -> list[Block]:
    """Its segment, from the first block to the last."""
    while block.before is not None:
        block = block.before
    out = [block]
    while out[-1].after is not None:
        out.append(out[-1].after)
    return out


def in_memory(blocks: list[Block]) -> int:
    """Bytes of those that are not addresses alone."""
    return sum(block.size for block in blocks if not isinstance(block, Unmapped))


@BOTH
@settings(max_examples=examples(60), deadline=None)
@given(asked=_ASKED)
def test_whatever_is_asked(kind: type[CachingAllocator], asked: list[tuple[int, str, int]]) -> None:
    """Blocks lie side by side in segments without a gap, free neighbours are one, and the counters are the sums."""
    allocator = kind()
    live: list[tuple[Block, int]] = []
    for nbytes, stream, free in asked:
        block = allocator.allocate(nbytes, stream)
        assert block.size >= rounded(nbytes)
        assert block.size - rounded(nbytes) <= (0 if kind is ExpandableAllocator or nbytes <= MIB else MIB)
        live.append((block, nbytes))
        if free < len(live):
            allocator.release(live.pop(free)[0])
    segments = {(id(blocks[0])): blocks for block, _ in live for blocks in [blocks_of(block)]}
    assert all(not block.free for block, _ in live)
    for blocks in segments.values():
        assert len({block.pool for block in blocks}) == 1
        for left, right in pairwise(blocks):
            assert right.address == left.address + left.size
            assert right.before is left
            assert not (left.free and right.free)
    assert allocator.allocated == sum(block.size for block, _ in live) <= allocator.reserved
    assert sum(map(in_memory, segments.values())) <= allocator.reserved
    assert allocator.most_allocated >= allocator.allocated
    assert allocator.most_reserved == allocator.reserved
    for block, _ in live:
        allocator.release(block)
    free = [
        size for _, blocks in allocator.layout() for size, _, whole in blocks if whole or kind is ExpandableAllocator
    ]
    assert allocator.allocated == 0
    assert sum(free) == allocator.reserved


@settings(max_examples=examples(60), deadline=None)
@given(asked=_ASKED, limit=st.integers(20, 200))
def test_a_limit_is_kept_and_changes_nothing_where_it_is_not_reached(
    asked: list[tuple[int, str, int]], limit: int
) -> None:
    limited, free = CachingAllocator(limit * MIB), CachingAllocator()
    live: list[tuple[Block, Block]] = []
    for nbytes, stream, which in asked:
        try:
            live.append((limited.allocate(nbytes, stream), free.allocate(nbytes, stream)))
        except OutOfMemory:
            assert limited.reserved <= limit * MIB
            return
        assert limited.most_reserved <= limit * MIB
        if which < len(live):
            for allocator, block in zip((limited, free), live.pop(which), strict=True):
                allocator.release(block)
    if free.reserved <= limit * MIB:
        assert (limited.reserved, limited.layout(), limited.retries) == (free.reserved, free.layout(), 0)


def test_a_segment_holds_its_request() -> None:
    for size in range(512, 40 * MIB, 333 * 512):
        assert segment_size(size) >= size
        assert segment_size(size) % SMALL_SEGMENT == 0


# --- expandable segments on a full device


def test_free_pages_in_the_middle_of_a_range_are_given_back() -> None:
    """And what is allocated next begins in the gap, where it has room there."""
    allocator = ExpandableAllocator(100 * MIB)
    first, second, third = (allocator.allocate(size * MIB, "default") for size in (10, 50, 20))
    allocator.release(second)  # from 10 to 60 MiB: two whole pages
    other = allocator.allocate(60 * MIB, "other")
    assert (allocator.reserved, allocator.retries) == (100 * MIB, 1)
    allocator.release(other)
    fourth = allocator.allocate(45 * MIB, "default")
    assert (fourth.address, allocator.reserved, allocator.retries) == (10 * MIB, 80 * MIB, 2)
    assert third.address == 60 * MIB
    for block in (first, third, fourth):
        allocator.release(block)
    allocator.allocate(100 * MIB, "other")
    assert allocator.reserved == 100 * MIB
    assert allocator.layout() == [("default", []), ("default", []), ("other", []), ("other", [])]


def test_where_the_gap_is_too_small_the_range_grows_at_its_end() -> None:
    allocator = ExpandableAllocator(80 * MIB)
    blocks = [allocator.allocate(20 * MIB, "default") for _ in range(3)]
    allocator.release(blocks[1])
    allocator.release(allocator.allocate(40 * MIB, "other"))
    assert allocator.retries == 1
    assert allocator.allocate(30 * MIB, "default").address == 60 * MIB
    assert (allocator.reserved, allocator.retries) == (80 * MIB, 2)
    assert allocator.allocate(5 * MIB, "default").address == 90 * MIB


def test_a_free_block_before_a_gap_counts_as_large_as_it_could_grow() -> None:
    allocator = ExpandableAllocator(120 * MIB)
    blocks = [allocator.allocate(size * MIB, "default") for size in (15, 50, 15, 10, 10)]  # 100 MiB
    allocator.release(blocks[1])  # from 15 to 65 MiB, of which 20 to 60 go
    allocator.release(allocator.allocate(60 * MIB, "other"))
    allocator.release(blocks[3])  # from 80 to 90 MiB
    assert allocator.allocate(4 * MIB, "default").address == 60 * MIB  # 5 MiB, and nothing behind them to grow into
    assert allocator.allocate(5 * MIB, "default").address == 80 * MIB  # not the 5 MiB from 15 on, that could be 45


@settings(max_examples=examples(100), deadline=None)
@given(asked=_ASKED, limit=st.integers(20, 200))
def test_expandable_segments_within_a_limit(asked: list[tuple[int, str, int]], limit: int) -> None:
    """Only what is really in use is kept: a request is refused where pages in use and its own are more than the limit."""
    allocator = ExpandableAllocator(limit * MIB)
    live: list[Block] = []
    for nbytes, stream, which in asked:
        try:
            live.append(allocator.allocate(nbytes, stream))
        except OutOfMemory:
            allocator.empty_cache()
            page = 20 * MIB if nbytes > MIB else 2 * MIB
            assert allocator.reserved + -(-max(nbytes, 1) // page) * page > limit * MIB
            assert allocator.reserved >= allocator.allocated
            return
        assert allocator.allocated <= allocator.reserved <= limit * MIB
        segments = {id(blocks[0]): blocks for block in live for blocks in [blocks_of(block)]}
        assert sum(map(in_memory, segments.values())) <= allocator.reserved
        for blocks in segments.values():
            for left, right in pairwise(blocks):
                assert right.address == left.address + left.size
                assert right.before is left
                assert not (left.free and right.free)
                assert not (isinstance(left, Unmapped) and isinstance(right, Unmapped))
        if which < len(live):
            allocator.release(live.pop(which))
    for block in live:
        allocator.release(block)
    allocator.empty_cache()
    assert allocator.reserved == 0
