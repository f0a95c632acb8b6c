"""Copies between the memory of a GPU and that of its host, over the link of the GPU to the host."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.core.dtypes import DType

Way = Literal["to the GPU", "to the host", "from NVMe", "to NVMe"]
WAYS: Final[tuple[Way, ...]] = ("to the GPU", "to the host")
OF_FILES: Final[tuple[Way, ...]] = ("from NVMe", "to NVMe")


class Transfer(NamedTuple):
    """The copies of one rank in a step, all micro-batches together."""

    name: str
    phase: Literal["forward", "backward", "step"]
    way: Way
    elements: int
    """The elements that a micro-batch copies, or that the step does."""
    times: int
    """How often: the number of micro-batches, or 1."""
    dtype: DType
    source: str

    @property
    def nbytes(self) -> int:
        """Return the bytes of a step."""
        return self.times * self.elements * self.dtype.itemsize

    @property
    def formula(self) -> str:
        """Return the bytes in numbers."""
        return f"{self.times}·{self.elements}·{self.dtype.itemsize} B"


def by_way(transfers: Iterable[Transfer], ways: tuple[Way, ...] = WAYS) -> dict[Way, int]:
    """Return the bytes that go each way."""
    out: Counter[Way] = Counter()
    for one in transfers:
        out[one.way] += one.nbytes
    return {way: out[way] for way in ways}
