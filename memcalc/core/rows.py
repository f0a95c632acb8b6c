"""A row: one named tensor, or one per layer, with the dims that make its bytes and the time that it lives. Every total
is a sum of rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal, NamedTuple

from memcalc.core.dims import Dim, Shape, evaluate, formula, numel
from memcalc.core.dtypes import DType

Component = Literal[
    "parameters",
    "gradients",
    "optimizer_states",
    "saved_activations",
    "buffers",
    "temporaries",
    "allocator",
    "reserved",
    "device",
]
Basis = Literal["exact", "modelled", "measured", "assumed", "traced"]
COMPONENTS: Final = ("parameters", "gradients", "optimizer_states", "saved_activations", "buffers", "temporaries")


class Row(NamedTuple):
    """`copies` equal blocks of `shape` and `dtype`. Sizes that vary are polynomials in batch and seq."""

    component: Component
    name: str
    shape: Shape
    dtype: DType
    copies: int = 1
    life: str = "always"
    basis: Basis = "exact"
    source: str = ""

    @property
    def nbytes(self) -> int:
        """Return the bytes of a row whose dims do not vary."""
        return self.copies * numel(self.shape)[0] * self.dtype.itemsize

    def bytes_at(self, batch: int, seq: int) -> int:
        """Return the bytes at a micro-batch of `batch` sequences of `seq` tokens."""
        return self.copies * evaluate(numel(self.shape)[1], batch, seq) * self.dtype.itemsize


class Item(NamedTuple):
    """A row as reported, for one batch and sequence length. `nbytes` counts in its component's total, `at_peak` in the
    peak.
    """

    component: Component
    name: str
    nbytes: int
    at_peak: int
    shape: tuple[tuple[str, int], ...]
    dtype: str
    life: str
    formula: str
    basis: Basis
    source: str
    blocks: int = 1


@lru_cache(maxsize=4096)
def named_sizes(shape: Shape, batch: int, seq: int) -> tuple[tuple[str, int], ...]:
    """Return the name and size of each atomic dim of a shape: (("batch", 1), ("seq", 2048), ("hidden", 4096))."""
    return tuple(
        (part.name, evaluate(part.poly, batch, seq)) for dim in shape for part in dim.parts if part.name != "1"
    )


def copied(
    sizes: tuple[tuple[str, int], ...], name: str, copies: int, layers: int | None
) -> tuple[tuple[str, int], ...]:
    """Return the dims of `copies` equal blocks: one per layer, several per layer, or several without layers. The name
    of a tensor with one block per layer contains a `*`."""
    if copies == 1:
        return sizes
    if "*" not in name or layers is None or (copies > layers and copies % layers):
        return (("copies", copies), *sizes)
    if copies <= layers:
        return (("layers", copies), *sizes)
    return (("layers", layers), ("copies", copies // layers), *sizes)


def dims_formula(sizes: tuple[tuple[str, int], ...], dtype: DType) -> str:
    """Return a row's bytes as a formula, in named dims and in numbers: "layers·batch·seq·hidden·2 B = 32·1·2048·4096·2
    B"."""
    unit = f"{dtype.itemsize} B"
    names, numbers = [name for name, _ in sizes], [str(size) for _, size in sizes]
    return f"{'·'.join([*names, unit])} = {'·'.join([*numbers, unit])}"


@lru_cache(maxsize=1024)
def shard(shape: Shape, axis: str, degree: int) -> Shape:
    """Return the shape of a flat 1/degree of a tensor, rounded up. ZeRO and FSDP shard one parameter like this."""
    if degree == 1:
        return shape
    return (Dim(f"⌈{formula(shape)}/{axis}⌉", -(-numel(shape)[0] // degree)),)
