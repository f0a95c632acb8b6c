"""The rules of torch's caching allocator for CUDA: what it reserves for a sequence of allocations and frees.

Source: c10/cuda/CUDACachingAllocator.cpp with its defaults (no expandable segments). A request is rounded up to 512 bytes.
Free blocks belong to a stream and to the pool of small (up to 1 MiB) or of large ones; the smallest that fits is taken, and
what remains of it is split off: of a small one from 512 bytes up, of a large one above 1 MiB. If none fits, a segment is
reserved: 2 MiB for small ones, 20 MiB for less than 10 MiB, else the request rounded up to 2 MiB. Neighbours in a segment
that are free become one. Nothing is given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 2**20
Pool = tuple[str, bool]
"""A stream, and whether the blocks are small."""


@dataclass(eq=False)
class Block:
    address: int
    size: int
    pool: Pool
    before: Block | None = None
    after: Block | None = None
    free: bool = False


class CachingAllocator:
    """`reserved` are the bytes of all segments so far."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[Pool, list[tuple[int, int, Block]]] = {}

    def allocate(self, nbytes: int, stream: str) -> Block:
        size = max(512, -(-nbytes // 512) * 512)
        pool = (stream, size <= MIB)
        free = self._free.setdefault(pool, [])
        place = bisect_left(free, size, key=lambda entry: entry[0])
        block = free.pop(place)[2] if place < len(free) else self._segment(size, pool)
        block.free = False
        rest = block.size - size
        if rest >= 512 if pool[1] else rest > MIB:
            split = Block(block.address + size, rest, pool, block, block.after)
            if block.after is not None:
                block.after.before = split
            block.size, block.after = size, split
            self._keep(split)
        return block

    def release(self, block: Block) -> None:
        before, after = block.before, block.after
        if after is not None and after.free:
            self._take(after)
            self._join(block, after)
        if before is not None and before.free:
            self._take(before)
            self._join(before, block)
            block = before
        self._keep(block)

    def _segment(self, size: int, pool: Pool) -> Block:
        rounded = 2 * MIB if pool[1] else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += rounded
        return Block(self.reserved << 20, rounded, pool)

    def _join(self, left: Block, right: Block) -> None:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left

    def _keep(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.pool], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address), key=lambda entry: entry[:2])]
