"""torch's caching allocator for CUDA: what it reserves for a sequence of allocations and frees.

Source: c10/cuda/CUDACachingAllocator.cpp, sizes from c10/core/AllocatorConfig.h. A request is rounded up to 512 bytes. Free
blocks belong to a stream and to the pool of small ones (up to 1 MiB) or of large ones; the smallest that fits is taken, the
lowest of equal ones, and what remains of it is split off: of a small one from 512 bytes up, of a large one above 1 MiB. If
none fits, a segment is reserved: 2 MiB for small ones, 20 MiB for less than 10 MiB, else the request rounded up to 2 MiB.
Free neighbours in a segment become one. Segments are given back where nothing else helps: when the device has no room for
another one, all that are free as a whole go (release_cached_blocks), and it is tried once more.

With `expandable_segments:True`: memcalc/device/expandable.py.

Not modelled, as they are off by default: `max_split_size_mb`, `roundup_power2_divisions`, `garbage_collection_threshold`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from memcalc.units import MIB

BLOCK: Final = 512
SMALL: Final = MIB
"""The largest request of the small pool."""
SMALL_SEGMENT: Final = 2 * MIB
LARGE_SEGMENT: Final = 20 * MIB
OWN_SEGMENT: Final = 10 * MIB
"""From here on a request has a segment of its own size."""
ROUNDING: Final = 2 * MIB


class OutOfMemory(Exception):
    """No room for another segment, whatever is given back."""


class Pool:
    """Blocks of one size class that one stream can take. `free` has those that are free, by size and address."""

    __slots__ = ("free", "page", "split_from", "stream", "unmapped")

    def __init__(self, stream: str, *, small: bool, split_from: int) -> None:
        self.stream = stream
        self.split_from = split_from
        """The least of a block that is split off when the rest of it is taken."""
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[Block] = []
        """Addresses of an expandable segment that have no memory, the lowest first."""


class Block:
    """A part of a segment, between its neighbours."""

    __slots__ = ("address", "after", "before", "free", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool, before: Block | None, after: Block | None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.before = before
        self.after = after
        self.free = False


def rounded(nbytes: int) -> int:
    """A request as the allocator counts it."""
    return max(BLOCK, -(-nbytes // BLOCK) * BLOCK)


def segment_size(size: int) -> int:
    """The segment that is reserved for a request of `size` bytes for which no free block is large enough."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUNDING) * ROUNDING


class CachingAllocator:
    """The allocator of one device. `limit` are the bytes that it may reserve; None: any number.

    `reserved` and `allocated` are what torch.cuda.memory_reserved and memory_allocated count, `most_reserved` and
    `most_allocated` the highest of them so far. `retries` counts how often segments had to be given back.
    """

    __slots__ = (
        "_pools", "_top", "allocated", "limit", "most_allocated", "most_reserved", "reserved", "retries",
    )  # fmt: skip
    split_from = SMALL + 1
    """Of large blocks; see Pool."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.reserved = self.most_reserved = self.allocated = self.most_allocated = self.retries = 0
        self._pools: dict[str, tuple[Pool, Pool]] = {}
        self._top = 0

    def allocate(self, nbytes: int, stream: str) -> Block:
        """A block of at least `nbytes`. OutOfMemory where the limit leaves no room for it."""
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
        """Free a block."""
        self.allocated -= block.size
        self._put(block)

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache: what is free as a whole goes back to the device."""
        self.reserved -= self._give_back()

    def layout(self) -> list[tuple[str, list[tuple[int, int, bool]]]]:
        """Of every free block its size, which in the order of addresses it is, and whether it is a whole segment.

        As long as what is allocated now stays, the allocator's answers depend on nothing else.
        """
        return [(stream, self._layout(pool)) for stream, pools in sorted(self._pools.items()) for pool in pools]

    def _pools_of(self, stream: str) -> tuple[Pool, Pool]:
        small, large = (Pool(stream, small=i == 0, split_from=(BLOCK, self.split_from)[i]) for i in range(2))
        self._pools[stream] = small, large
        return small, large

    # --- the ways in which expandable segments differ

    def _place(self, pool: Pool, size: int) -> int:
        """Return where in the list of free blocks the smallest is that is large enough."""
        return bisect_left(pool.free, (size,))

    def _new_block(self, pool: Pool, size: int) -> Block:
        """A segment that the device gives for a request."""
        wanted = segment_size(size)
        if not self._has_room(wanted):
            self._retry()
            if not self._has_room(wanted):
                raise OutOfMemory(f"{wanted} bytes more than the {self.reserved} that are reserved")
        self._reserve(wanted)
        block = Block(self._top, wanted, pool, None, None)
        self._top += wanted
        return block

    def _give_back(self) -> int:
        """The bytes of all segments that are free as a whole, which the device has again (release_cached_blocks)."""
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

    # --- common to both

    def _put(self, block: Block) -> Block:
        """A block is free: it and its free neighbours become the one that is returned."""
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
        """Before the device is asked once more (release_cached_blocks)."""
        self.reserved -= self._give_back()
        self.retries += 1

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        if self.reserved > self.most_reserved:
            self.most_reserved = self.reserved


def _is_whole(block: Block) -> bool:
    """Tell whether a block is all of its segment."""
    return block.before is None and block.after is None


def _join(left: Block, right: Block) -> None:
    left.size += right.size
    left.after = right.after
    if right.after is not None:
        right.after.before = left
