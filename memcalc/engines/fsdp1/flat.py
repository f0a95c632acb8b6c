"""A flat parameter: the parameters of a unit one after the other in one tensor, cut into equal shards.

With `use_orig_params=True` each parameter begins at a multiple of 16 bytes of the dtype that it is gathered in, the end is
padded to a multiple of the ranks, and the optimizer sees what a rank's shard has of each parameter. Without, parameters
follow each other, only the shards are padded, and the optimizer sees a shard as one tensor
(FlatParamHandle._init_flat_param_and_metadata and _get_shard in torch/distributed/fsdp/_flat_param.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import numel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memcalc.core.dims import Shape

ALIGNMENT_BYTES: Final = 16  # _get_aligned_numel
ROOT: Final = ("", None)


class Part(NamedTuple):
    """Some elements of a flat parameter: a parameter, or padding, which has no name."""

    name: str
    elements: int


class Slice(NamedTuple):
    """The elements of a parameter that one rank's shard has."""

    name: str
    elements: int


class Flat(NamedTuple):
    """The layout of a flat parameter."""

    parts: tuple[Part, ...]
    ranks: int

    @property
    def unpadded(self) -> int:
        """Return the elements of the flat gradient: all parts, without the padding of shards."""
        return sum(part.elements for part in self.parts)

    @property
    def shard(self) -> int:
        """Return the elements of one rank's shard."""
        return -(-self.unpadded // self.ranks)

    @property
    def elements(self) -> int:
        """Return the elements of all shards: what is gathered and reduced."""
        return self.shard * self.ranks

    def slices(self, rank: int) -> tuple[Slice, ...]:
        """Return what a rank's shard has of each parameter. Padding is no part of any (_get_shard_metadata)."""
        begin, end = self.shard * rank, self.shard * (rank + 1)
        return tuple(Slice(part.name, n) for part, n in self._within(begin, end) if part.name)

    def _within(self, begin: int, end: int) -> Iterator[tuple[Part, int]]:
        place = 0
        for part in self.parts:
            elements = min(end, place + part.elements) - max(begin, place)
            if elements > 0:
                yield part, elements
            place += part.elements


def flat_of(parameters: Iterable[tuple[str, Shape]], ranks: int, itemsize: int, *, original: bool) -> Flat:
    """Return the flat parameter of these parameters, each with its name, gathered in a dtype of `itemsize` bytes.

    `original` is FSDP1's `use_orig_params`.
    """
    sizes = tuple((name, numel(shape)[0]) for name, shape in parameters)
    if not original:
        return Flat(tuple(Part(*one) for one in sizes), ranks)
    return _flat(sizes, ranks, ALIGNMENT_BYTES // itemsize)


@lru_cache(maxsize=1024)
def _flat(parameters: tuple[tuple[str, int], ...], ranks: int, aligned: int) -> Flat:
    parts: list[Part] = []
    total = 0
    for name, elements in parameters:
        padding = -total % aligned
        parts += [Part("", padding)] if padding else []
        parts.append(Part(name, elements))
        total += padding + elements
    padding = -total % ranks
    return Flat((*parts, Part("", padding)) if padding else tuple(parts), ranks)


def stack_and_layer(path: str, layer: int | None) -> tuple[str, int | None]:
    """Return the unit of a module or a weight at `path`: its stack's path and its layer, or the root."""
    return ROOT if layer is None else (path.split("*")[0], layer)
