"""Named dims and the sizes they make.

A dim has a name from the legend in `docs/legend.md`, a size, and the same size as a polynomial in the two numbers that a
planner varies most: `batch` (sequences in a micro-batch) and `seq` (tokens in a sequence). Every size in a training step
is such a polynomial, so one run on paper answers for all batch sizes and sequence lengths that take the same branches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import lru_cache
from typing import Final, NamedTuple

Poly = tuple[int, int, int, int, int, int]
"""The coefficients of 1, seq, seq², batch, batch·seq and batch·seq²."""

ZERO: Final[Poly] = (0, 0, 0, 0, 0, 0)
_ONE: Final[Poly] = (1, 0, 0, 0, 0, 0)


def evaluate(poly: Poly, batch: int, seq: int) -> int:
    """Return the polynomial's value for a micro-batch of `batch` sequences of `seq` tokens."""
    c0, c1, c2, b0, b1, b2 = poly
    return c0 + seq * (c1 + seq * c2) + batch * (b0 + seq * (b1 + seq * b2))


def multiply(left: Poly, right: Poly) -> Poly:
    """Return the product of two polynomials. Raises OverflowError above batch¹·seq², which no tensor of a training step
    has."""
    out = [0] * 6
    for i, a in enumerate(left):
        if not a:
            continue
        for j, b in enumerate(right):
            if not b:
                continue
            batch, seq = i // 3 + j // 3, i % 3 + j % 3
            if batch > 1 or seq > 2:
                raise OverflowError(f"batch^{batch} * seq^{seq}")
            out[3 * batch + seq] += a * b
    return tuple(out)  # type: ignore[return-value]


class Dim:
    """One named dim. `parts` are the atomic dims of a merged dim ("batch·seq"); an atomic dim is its own only part."""

    __slots__ = ("name", "parts", "poly", "size")

    def __init__(self, name: str, size: int, poly: Poly | None = None, parts: tuple[Dim, ...] | None = None) -> None:
        self.name = name
        self.size = size
        self.poly: Poly = poly if poly is not None else (size, 0, 0, 0, 0, 0)
        self.parts: tuple[Dim, ...] = parts if parts is not None else (self,)

    def __repr__(self) -> str:
        return f"{self.name}={self.size}"

    def resizable(self) -> Hashable:
        """Return what decides the size besides a number of ranks, if other numbers have this dim with another size; else
        None."""
        return None


Shape = tuple[Dim, ...]
ONE_DIM: Final = Dim("1", 1)


class Size(NamedTuple):
    """The batch and the sequence length of a run."""

    batch: Dim
    seq: Dim


def workload_size(batch: int, seq: int) -> Size:
    """Return the dims `batch` and `seq`, each a polynomial in itself."""
    return Size(Dim("batch", batch, (0, 0, 0, 1, 0, 0)), Dim("seq", seq, (0, 1, 0, 0, 0, 0)))


def fixed_size(batch: int, seq: int) -> Size:
    """Return the dims `batch` and `seq` as plain numbers, for a program whose sizes are no polynomials in them."""
    return Size(Dim("batch", batch), Dim("seq", seq))


@lru_cache(maxsize=4096)
def merge(*dims: Dim) -> Dim:
    """Return the given dims flattened into one."""
    if len(dims) == 1:
        return dims[0]
    size, poly = 1, _ONE
    for dim in dims:
        size *= dim.size
        poly = multiply(poly, dim.poly)
    parts = tuple(part for dim in dims for part in dim.parts if part is not ONE_DIM)
    return Dim("·".join(part.name for part in parts) or "1", size, poly, parts or (ONE_DIM,))


@lru_cache(maxsize=1024)
def plus(dim: Dim, more: int) -> Dim:
    """Return `dim` made longer by `more` elements, as padding does."""
    if not more:
        return dim
    poly = (dim.poly[0] + more, *dim.poly[1:])
    return Dim(f"({dim.name}+{more})", dim.size + more, poly)  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def divided(dim: Dim, divisor: int) -> Dim:
    """Return one of `divisor` equal parts of `dim`, as `chunk` makes them. Raises ValueError if the size does not
    divide."""
    if dim.size % divisor or any(c % divisor for c in dim.poly):
        raise ValueError(f"{dim} is not divisible by {divisor}")
    return Dim(f"{dim.name}/{divisor}", dim.size // divisor, tuple(c // divisor for c in dim.poly))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def whole_of(part: Dim, ranks: int, suffix: str) -> Dim:
    """Return the dim that `ranks` ranks hold equal parts of. `part` is one rank's, and its name ends with `suffix`."""
    return Dim(part.name.removesuffix(suffix), ranks * part.size, tuple(ranks * c for c in part.poly))  # type: ignore[arg-type]


@lru_cache(maxsize=16384)
def numel(shape: Shape) -> tuple[int, Poly]:
    """Return the number of elements of a tensor of `shape`, as an integer and as a polynomial."""
    size, poly = 1, _ONE
    for dim in shape:
        if dim is not ONE_DIM:
            size *= dim.size
            poly = multiply(poly, dim.poly)
    return size, poly


def formula(shape: Iterable[Dim]) -> str:
    """Return the atomic dims of a shape as a product: "batch·seq·heads·head_dim"."""
    return "·".join(_factor(part.name) for dim in shape for part in dim.parts if part is not ONE_DIM) or "1"


@lru_cache(maxsize=4096)
def _factor(name: str) -> str:
    """Return a dim's name as a factor of a product: in parentheses if it is a sum."""
    depth = 0
    for letter in name:
        depth += (letter in "(⌈") - (letter in ")⌉")
        if letter in "+-" and not depth:
            return f"({name})"
    return name
