"""Saved activations on the host, and their way there and back (TRL's OffloadActivations).

Each moved tensor has a block of pinned memory of its own from forward until backward has brought it back. The blocks are those
of one micro-batch: the next one's take their place.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import numel
from memcalc.offload.host import HostRow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.core.dtypes import DType
    from memcalc.core.offloading import Copied
    from memcalc.core.rows import Basis

SOURCE: Final = "TRL 1.16 trl/models/activation_offloading.py, OffloadActivations"
OF_GROUPS: Final = "megatron/core/pipeline_parallel/fine_grained_activation_offload.py"
_LIFE: Final = "forward to backward"


def on_host(copied: Iterable[Copied], ranks: int, basis: Basis) -> list[HostRow]:
    """Return the rows of a node: what each of its `ranks` ranks has moved to the host when forward is over."""
    kinds = Counter((one.name, numel(one.shape)[0], one.dtype) for one in copied if not one.back)
    return [
        HostRow("pinned", f"activations: {name}", "elements", (size,) * count * ranks, dtype, _LIFE, SOURCE, basis)
        for (name, size, dtype), count in kinds.items()
    ]


def of_chunks(
    chunks: Iterable[Iterable[Copied]], in_flight: Iterable[tuple[int, ...]], ranks: int, basis: Basis
) -> list[HostRow]:
    """Return the rows of a node whose `ranks` ranks keep as much as the reported one. A shape's pinned blocks are used again,
    so there are as many as the micro-batches in flight need at once: `in_flight` has those of each chunk, state by state."""
    kinds = [Counter((one.name, numel(one.shape)[0], one.dtype) for one in copied if not one.back) for copied in chunks]
    most: Counter[tuple[str, int, DType]] = Counter()
    for counts in in_flight:
        now: Counter[tuple[str, int, DType]] = Counter()
        for of_chunk, count in zip(kinds, counts, strict=True):
            now.update({kind: n * count for kind, n in of_chunk.items()})
        most |= now
    return [
        HostRow("pinned", f"activations: {name}", "elements", (size,) * count * ranks, dtype, _LIFE, OF_GROUPS, basis)
        for (name, size, dtype), count in most.items()
        if count
    ]


def copied_bytes(copied: Iterable[Copied], *, back: bool) -> int:
    """Return the bytes that a micro-batch copies to the host, or back."""
    return sum(numel(one.shape)[0] * one.dtype.itemsize for one in copied if one.back is back)
