"""The sizes of FSDP2's blocks: padded for the ranks of a shard, whole or a part.

The number of ranks decides these sizes and nothing else, if there is more than one. So a run for two ranks is the run
for any number, with other sizes in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import Dim, Shape, numel

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from memcalc.tape.runs import Trace


def padded_elements(shape: Shape, ranks: int) -> int:
    """Return the elements of a parameter with its first dim padded to a multiple of the ranks
    (_get_dim0_padded_size)."""
    first, *rest = shape
    return -(-first.size // ranks) * ranks * numel(tuple(rest))[0]


class ShardedDim(Dim):
    """The elements of some parameters gathered over a number of ranks, or of one rank's shard of them."""

    __slots__ = ("experts", "is_shard", "parameters")

    def __init__(self, name: str, parameters: Sequence[Shape], ranks: int, *, is_shard: bool, experts: bool) -> None:
        whole = sum(padded_elements(shape, ranks) for shape in parameters)
        super().__init__(name, whole // ranks if is_shard else whole)
        self.parameters, self.is_shard = parameters, is_shard
        self.experts = experts
        """True if the ranks are those that have the same experts."""

    def resizable(self) -> Hashable:
        sizes = tuple((first.size, numel(tuple(rest))[0]) for first, *rest in self.parameters)
        return self.experts, self.is_shard, sizes

    def over(self, ranks: int) -> ShardedDim:
        """Return the dim over another number of ranks."""
        return ShardedDim(self.name, self.parameters, ranks, is_shard=self.is_shard, experts=self.experts)


def sized(dim: Dim, ranks: int, expert_ranks: int) -> Dim:
    """Return a dim over this number of ranks, made from the dim over another number."""
    return dim.over(expert_ranks if dim.experts else ranks) if isinstance(dim, ShardedDim) else dim


def resized(run: Trace, sized: Callable[[Dim], Dim]) -> Trace:
    """Return a run with other sizes of the dims that have some for every number of ranks."""
    dims: dict[Dim, Dim] = {}
    rows = list(run.rows)
    for i, row in enumerate(rows):
        if len(row.shape) == 1 and isinstance(dim := row.shape[0], ShardedDim):
            if dim not in dims:
                dims[dim] = sized(dim)
            rows[i] = row._replace(shape=(dims[dim],))
    return run._replace(rows=rows)
