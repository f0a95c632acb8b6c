"""torch's caching allocator with `expandable_segments:True`: memory comes and goes by pages, under addresses that stay.

Source: c10/cuda/CUDACachingAllocator.cpp (find_expandable_block, map_block, try_allocate_expandable_block, get_free_block,
unmap_block). Each pool of a stream has one range of addresses, as long as it may ever be, in pages of 2 MiB (small) or 20 MiB
(large). A block is split from 512 bytes up. Of the free blocks the smallest that fits is taken; one that has addresses without
memory behind it counts as large as it could grow. If none fits, pages are mapped at the lowest address at which there is room,
behind the free block before it if there is one. Where the device has no more memory, all whole pages of free blocks go back to
it, in the middle of the range too, and it is tried once more.

Not modelled: that a range is 1 1/8 times the GPU's memory and a second one is begun behind it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from memcalc.device.allocator import BLOCK, Block, CachingAllocator, OutOfMemory, Pool

_ADDRESSES: Final = 1 << 60


class Unmapped(Block):
    """Addresses that have no memory."""

    __slots__ = ()


class ExpandableAllocator(CachingAllocator):
    """The allocator of one device with expandable segments; see CachingAllocator."""

    __slots__ = ()
    split_from = BLOCK

    def _place(self, pool: Pool, size: int) -> int:
        free = pool.free
        place = bisect_left(free, (size,))
        while place + 1 < len(free) and _could_grow_to(free[place + 1][2]) < _could_grow_to(free[place][2]):
            place += 1
        return place

    def _new_block(self, pool: Pool, size: int) -> Block:
        """A free block that grows, or pages of its own."""
        block = self._grown(pool, size)
        if block is None:
            self._retry()
            block = self._grown(pool, size)
        if block is None:
            raise OutOfMemory(f"{size} bytes have no room beside the {self.reserved} that are reserved")
        del pool.free[bisect_left(pool.free, (block.size, block.address))]
        return block

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """A free block of at least `size` bytes, which is still in the list; None where the device has too little."""
        block = _first_with_room(pool, size)
        if isinstance(block, Unmapped):
            block = self._map(block, min(size, block.size))
        while block is not None and block.size < size:
            behind = block.after
            assert isinstance(behind, Unmapped)
            block = self._map(behind, min(size - block.size, behind.size))
        return block

    def _map(self, unmapped: Block, nbytes: int) -> Block | None:
        """The free block that has the first pages of `unmapped` now; None where the device has too little."""
        pool = unmapped.pool
        nbytes = -(-nbytes // pool.page) * pool.page
        if not self._has_room(nbytes):
            return None
        self._reserve(nbytes)
        block = Block(unmapped.address, nbytes, pool, unmapped.before, unmapped)
        if unmapped.before is not None:
            unmapped.before.after = block
        unmapped.before = block
        unmapped.address += nbytes
        unmapped.size -= nbytes
        if not unmapped.size:
            pool.unmapped.remove(unmapped)
            block.after = unmapped.after
            if unmapped.after is not None:
                unmapped.after.before = block
        return self._put(block)

    def _give_back(self) -> int:
        """The bytes of all pages that are free as a whole, which the device has again (release_cached_blocks)."""
        return sum(_unmap(block) for pools in self._pools.values() for pool in pools for *_, block in list(pool.free))

    def _layout(self, pool: Pool) -> list[tuple[int, int, bool]]:
        """Of addresses without memory the size is negative; those behind all others are left out."""
        blocks = [(size, address) for size, address, _ in pool.free]
        blocks += [(-one.size, one.address) for one in pool.unmapped[:-1]]
        places = {address: i for i, address in enumerate(sorted(address for _, address in blocks))}
        return [(size, places[address], False) for size, address in blocks]


def _could_grow_to(block: Block) -> int:
    return block.size + (block.after.size if isinstance(block.after, Unmapped) else 0)


def _first_with_room(pool: Pool, size: int) -> Block:
    """The lowest addresses without memory, or the free block before them, from which on `size` bytes are not in use."""
    if not pool.unmapped:
        pool.unmapped.append(Unmapped(0, _ADDRESSES, pool, None, None))
    for unmapped in pool.unmapped:
        first = unmapped if unmapped.before is None or not unmapped.before.free else unmapped.before
        room, block = 0, first
        while room < size and block is not None and (block.free or isinstance(block, Unmapped)):
            room += block.size
            block = block.after
        if room >= size:
            return first
    raise AssertionError("the last addresses have room for anything")


def _unmap(block: Block) -> int:
    """Give the whole pages of a free block back; what is before and behind them stays free."""
    pool, end = block.pool, block.address + block.size
    first, last = -(-block.address // pool.page) * pool.page, end // pool.page * pool.page
    if first >= last:
        return 0
    del pool.free[bisect_left(pool.free, (block.size, block.address))]
    unmapped = Unmapped(first, last - first, pool, block.before, block.after)
    if first > block.address:
        block.size = first - block.address
        insort(pool.free, (block.size, block.address, block))
        unmapped.before = block
    if end > last:
        rest = Block(last, end - last, pool, unmapped, block.after)
        rest.free = True
        insort(pool.free, (rest.size, rest.address, rest))
        if rest.after is not None:
            rest.after.before = rest
        unmapped.after = rest
    _link(unmapped)
    return last - first


def _link(unmapped: Unmapped) -> None:
    """Between its neighbours; those without memory become one with it."""
    pool = unmapped.pool
    before, after = unmapped.before, unmapped.after
    if isinstance(before, Unmapped):
        pool.unmapped.remove(before)
        unmapped.address, unmapped.size, unmapped.before = before.address, before.size + unmapped.size, before.before
    if isinstance(after, Unmapped):
        pool.unmapped.remove(after)
        unmapped.size, unmapped.after = unmapped.size + after.size, after.after
    if unmapped.before is not None:
        unmapped.before.after = unmapped
    if unmapped.after is not None:
        unmapped.after.before = unmapped
    insort(pool.unmapped, unmapped, key=lambda one: one.address)
