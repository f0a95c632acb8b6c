"""torch's caching allocator with `expandable_segments:True`: pages of memory are mapped and unmapped at fixed addresses.

Source: c10/cuda/CUDACachingAllocator.cpp (find_expandable_block, map_block, try_allocate_expandable_block, get_free_block,
unmap_block). The rules:

- Each pool of a stream has one range of addresses without an end, in pages of 2 MiB (small pool) or 20 MiB (large pool).
- The rest of a block is split off if it has at least 512 bytes.
- A request takes the smallest free block that fits. Of blocks that fit, one followed by addresses without memory counts as
  large as it could grow.
- If no free block fits, pages are mapped at the lowest address with enough room. A free block before that address grows.
- If the device has no more memory, all whole pages of free blocks are given back, also in the middle of the range, and the
  allocator asks once more.

Not modelled: the real range is 1 1/8 times the GPU's memory, and a second range begins where the first one is used up.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from memcalc.device.allocator import BLOCK, Block, CachingAllocator, OutOfMemory, Pool

_ADDRESSES: Final = 1 << 60


class Unmapped(Block):
    """A range of addresses without memory."""

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
        """Return a block for a request: a free block that grows, or new pages. Raise OutOfMemory if the limit leaves no room."""
        block = self._grown(pool, size)
        if block is None:
            self._retry()
            block = self._grown(pool, size)
        if block is None:
            raise OutOfMemory(f"{size} bytes have no room beside the {self.reserved} that are reserved")
        del pool.free[bisect_left(pool.free, (block.size, block.address))]
        return block

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """Map pages until a free block has at least `size` bytes. Return the block, which is still in the free list; None if the
        device has too little memory."""
        block = _first_with_room(pool, size)
        if isinstance(block, Unmapped):
            block = self._map(block, min(size, block.size))
        while block is not None and block.size < size:
            behind = block.after
            assert isinstance(behind, Unmapped)
            block = self._map(behind, min(size - block.size, behind.size))
        return block

    def _map(self, unmapped: Block, nbytes: int) -> Block | None:
        """Map the first pages of `unmapped`, at least `nbytes`. Return the free block that has them; None if the device has too
        little memory."""
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
        """Give all whole pages of free blocks back to the device (release_cached_blocks). Return their bytes."""
        return sum(_unmap(block) for pools in self._pools.values() for pool in pools for *_, block in list(pool.free))

    def _layout(self, pool: Pool) -> list[tuple[int, int, bool]]:
        """Return a pool's free blocks as `layout` does. An address range without memory has a negative size; the last such range
        is left out."""
        blocks = [(size, address) for size, address, _ in pool.free]
        blocks += [(-one.size, one.address) for one in pool.unmapped[:-1]]
        places = {address: i for i, address in enumerate(sorted(address for _, address in blocks))}
        return [(size, places[address], False) for size, address in blocks]


def _could_grow_to(block: Block) -> int:
    return block.size + (block.after.size if isinstance(block.after, Unmapped) else 0)


def _first_with_room(pool: Pool, size: int) -> Block:
    """Return the first block of the lowest `size` bytes in a row that are free or without memory: a range without memory, or the
    free block before that range."""
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
    """Give the whole pages of a free block back and return their bytes. The parts before and after these pages stay free."""
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
    """Link a range without memory to its neighbours, and merge it with neighbours that have no memory either."""
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
