"""torch's caching allocator for CUDA: what it reserves for a sequence of allocations and frees.

Source: c10/cuda/CUDACachingAllocator.cpp; sizes from c10/core/AllocatorConfig.h. The rules:

- A request is rounded up to 512 bytes.
- Every stream has two pools of free blocks: one for small requests (up to 1 MiB), one for large requests.
- A request takes the smallest free block that fits; among equal sizes, the block at the lowest address. Here every new
  segment lies below all earlier ones. The driver decides that, and no source says how. With the requests and the addresses of
  19 runs on an H200 (tests/measured_requests) these rules reserve every byte that was reserved; with falling addresses in 18.
- The rest of that block is split off if it has at least 512 bytes (small pool) or more than 1 MiB (large pool).
- If no free block fits, a segment is reserved: 2 MiB for a small request, 20 MiB for one below 10 MiB, else the request
  rounded up to 2 MiB.
- Adjacent free blocks of a segment are merged.
- If the device has no room for a new segment, all segments without a block in use are given back to the device
  (release_cached_blocks), and the allocator asks once more.

memcalc/device/expandable.py has the rules with `expandable_segments:True`.

Not modelled, as they are off by default: `max_split_size_mb`, `roundup_power2_divisions`, `garbage_collection_threshold`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from memcalc.units import MIB

BLOCK: Final = 512
SMALL: Final = MIB
"""The largest request of the small pool, in bytes."""
SMALL_SEGMENT: Final = 2 * MIB
LARGE_SEGMENT: Final = 20 * MIB
OWN_SEGMENT: Final = 10 * MIB
"""The smallest request, in bytes, that gets a segment of its own size."""
ROUNDING: Final = 2 * MIB


class OutOfMemory(Exception):
    """The error that the device has no room for another segment, even after cached segments were given back."""


class Pool:
    """The free blocks of one stream and one size class. `free` is sorted by size, then by address."""

    __slots__ = ("free", "page", "split_from", "stream", "unmapped")

    def __init__(self, stream: str, *, small: bool, split_from: int) -> None:
        self.stream = stream
        self.split_from = split_from
        """The smallest remainder of a block, in bytes, that is split off when a request takes the block."""
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[Block] = []
        """Address ranges of an expandable segment without memory, the lowest first."""


class Block:
    """A part of a segment. `before` and `after` are its neighbours in the segment."""

    __slots__ = ("address", "after", "before", "free", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool, before: Block | None, after: Block | None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.before = before
        self.after = after
        self.free = False


def rounded(nbytes: int) -> int:
    """Return the size in bytes that the allocator counts for a request: rounded up to 512."""
    return max(BLOCK, -(-nbytes // BLOCK) * BLOCK)


def segment_size(size: int) -> int:
    """Return the size of the segment that is reserved for a request of `size` bytes if no free block fits."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUNDING) * ROUNDING


class CachingAllocator:
    """The allocator of one device. It may reserve up to `limit` bytes; None means no limit.

    `reserved` and `allocated` are the numbers of torch.cuda.memory_reserved and memory_allocated, in bytes. `most_reserved`
    and `most_allocated` are their maxima so far. `retries` counts how often cached segments were given back because the
    device was full.
    """

    __slots__ = (
        "_lowest", "_pools", "allocated", "limit", "most_allocated", "most_reserved", "reserved", "retries",
    )  # fmt: skip
    split_from = SMALL + 1
    """`Pool.split_from` of the large pool."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.reserved = self.most_reserved = self.allocated = self.most_allocated = self.retries = 0
        self._pools: dict[str, tuple[Pool, Pool]] = {}
        self._lowest = 0

    def allocate(self, nbytes: int, stream: str) -> Block:
        """Return a block of at least `nbytes` bytes. Raise OutOfMemory if the limit leaves no room for a block."""
        size = (nbytes + BLOCK - 1) // BLOCK * BLOCK or BLOCK
        pools = self._pools.get(stream) or self._pools_of(stream)
        pool = pools[size > SMALL]
        free = pool.free
        place = self._place(pool, size)
        block = free.pop(place)[2] if place < len(free) else self._new_block(pool, size)
        block.free = False
        rest = block.size - size
        if rest >= pool.split_from:
            after = block.after
            split = Block(block.address + size, rest, pool, block, after)
            if after is not None:
                after.before = split
            block.size, block.after = size, split
            split.free = True
            insort(free, (rest, split.address, split))
        self.allocated += block.size
        if self.allocated > self.most_allocated:
            self.most_allocated = self.allocated
        return block

    def release(self, block: Block) -> None:
        """Free a block: it stays reserved."""
        self.allocated -= block.size
        self._put(block)

    def empty_cache(self) -> None:
        """Give segments without a block in use back to the device, as torch.cuda.empty_cache does."""
        self.reserved -= self._give_back()

    def layout(self) -> list[tuple[str, list[tuple[int, int, bool]]]]:
        """Return each pool's stream and free blocks: size in bytes, position by address, and True for a whole segment.

        While the blocks that are allocated now stay allocated, the allocator's answers depend on nothing else.
        """
        return [(stream, self._layout(pool)) for stream, pools in sorted(self._pools.items()) for pool in pools]

    def _pools_of(self, stream: str) -> tuple[Pool, Pool]:
        small, large = (Pool(stream, small=i == 0, split_from=(BLOCK, self.split_from)[i]) for i in range(2))
        self._pools[stream] = small, large
        return small, large

    # --- replaced by expandable segments

    def _place(self, pool: Pool, size: int) -> int:
        """Return the index in the pool's free list of the smallest block that fits; the list's length if none fits."""
        return bisect_left(pool.free, (size,))

    def _new_block(self, pool: Pool, size: int) -> Block:
        """Reserve a segment for a request and return it as one block. Raise OutOfMemory if the limit leaves no room."""
        wanted = segment_size(size)
        if not self._has_room(wanted):
            self._retry()
            if not self._has_room(wanted):
                raise OutOfMemory(f"{wanted} bytes more than the {self.reserved} that are reserved")
        self._reserve(wanted)
        self._lowest -= wanted
        return Block(self._lowest, wanted, pool, None, None)

    def _give_back(self) -> int:
        """Give all segments without a block in use back to the device (release_cached_blocks). Return their bytes."""
        given = 0
        for pools in self._pools.values():
            for pool in pools:
                parts = [entry for entry in pool.free if not _is_whole(entry[2])]
                given += sum(size for size, _, _ in pool.free) - sum(size for size, _, _ in parts)
                pool.free[:] = parts
        return given

    def _layout(self, pool: Pool) -> list[tuple[int, int, bool]]:
        places = {address: i for i, address in enumerate(sorted(address for _, address, _ in pool.free))}
        return [(size, places[address], _is_whole(block)) for size, address, block in pool.free]

    # --- common to both kinds of segments

    def _put(self, block: Block) -> Block:
        """Put a block into its pool's free list, merged with its free neighbours. Return the merged block."""
        free = block.pool.free
        before, after = block.before, block.after
        if after is not None and after.free:
            del free[bisect_left(free, (after.size, after.address))]
            _join(block, after)
        if before is not None and before.free:
            del free[bisect_left(free, (before.size, before.address))]
            _join(before, block)
            block = before
        block.free = True
        insort(free, (block.size, block.address, block))
        return block

    def _has_room(self, nbytes: int) -> bool:
        return self.limit is None or self.reserved + nbytes <= self.limit

    def _retry(self) -> None:
        """Give cached memory back before the allocator asks the device once more (release_cached_blocks)."""
        self.reserved -= self._give_back()
        self.retries += 1

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        if self.reserved > self.most_reserved:
            self.most_reserved = self.reserved


def _is_whole(block: Block) -> bool:
    """Return True if a block is all of its segment."""
    return block.before is None and block.after is None


def _join(left: Block, right: Block) -> None:
    left.size += right.size
    left.after = right.after
    if right.after is not None:
        right.after.before = left
