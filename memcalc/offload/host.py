"""Rows of the host's memory, and their sums for a node.

Pinned memory comes from torch's caching allocator of the host, which rounds each block up to a power of two and keeps it
(aten/src/ATen/core/CachingHostAllocator.h, allocate). DeepSpeed asks it for its buffers, unless DS_PIN_MEMORY_BACKEND says
otherwise (deepspeed/accelerator/abstract_accelerator.py, pin_memory).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.core.dtypes import DType
    from memcalc.core.rows import Basis

Kind = Literal["pinned", "paged", "nvme"]
KINDS: Final = ("pinned", "paged", "nvme")
ALLOCATOR: Final = "aten/src/ATen/core/CachingHostAllocator.h"


class HostRow(NamedTuple):
    """Equal blocks that the ranks of a node keep between steps: `sizes` has the elements of each, rank by rank."""

    kind: Kind
    name: str
    dim: str
    """What the elements of a block are."""
    sizes: tuple[int, ...]
    dtype: DType
    life: str
    source: str
    basis: Basis = "modelled"
    is_rounded: bool = True
    """False for pinned memory that is not of torch's allocator: DeepSpeed's own locks whole pages (csrc/aio/py_lib)."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all blocks."""
        return sum(self.sizes) * self.dtype.itemsize

    @property
    def formula(self) -> str:
        """Return the bytes in words and in numbers."""
        item, count = self.dtype.itemsize, len(self.sizes)
        if len(set(self.sizes)) == 1:
            return f"blocks·{self.dim}·{item} B = {count}·{self.sizes[0]}·{item} B"
        return f"{self.dim} of {count} blocks·{item} B = {sum(self.sizes)}·{item} B"


class HostItem(NamedTuple):
    """A row of the host as reported: the bytes of a node."""

    kind: Kind
    name: str
    nbytes: int
    blocks: int
    dtype: str
    life: str
    formula: str
    basis: Basis
    source: str


def host_items(rows: Iterable[HostRow]) -> list[HostItem]:
    """Return the items of a node, the largest first, and what the allocator of pinned memory adds to them."""
    found = [row for row in rows if row.nbytes]
    items = [
        HostItem(r.kind, r.name, r.nbytes, len(r.sizes), r.dtype.name, r.life, r.formula, r.basis, r.source)
        for r in found
    ]
    items.sort(key=lambda item: -item.nbytes)
    more = sum(
        rounded_up(n * r.dtype.itemsize) - n * r.dtype.itemsize
        for r in found
        if r.kind == "pinned" and r.is_rounded
        for n in r.sizes
    )
    if not more:
        return items
    blocks = sum(len(r.sizes) for r in found if r.kind == "pinned" and r.is_rounded)
    return [*items, HostItem("pinned", _ROUNDED, more, blocks, "", "always", _HOW.format(more), "modelled", ALLOCATOR)]


_ROUNDED: Final = "pinned blocks rounded up to powers of two"
_HOW: Final = "the next power of two of each pinned block less its bytes = {} B"


def rounded_up(nbytes: int) -> int:
    """Return the bytes of a pinned block: the next power of two."""
    return 1 << max(0, nbytes - 1).bit_length() if nbytes else 0


def totals(items: Iterable[HostItem]) -> dict[str, int]:
    """Return the bytes of a node by kind."""
    out: dict[str, int] = dict.fromkeys(KINDS, 0)
    for item in items:
        out[item.kind] += item.nbytes
    return out
