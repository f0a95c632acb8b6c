"""The grids that tensor-parallel ranks form: a line of p, a square of q·q, d squares, a cube of l·l·l.

Sources: Colossal-AI 0.5.0, colossalai/legacy/context/process_group_initializer/initializer_{1d,2d,2p5d,3d}.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Final, NamedTuple

DIMS: Final = ("1", "2", "2.5", "3")
"""The numbers of dimensions, as `--tp-dims` names them."""
LAYERS: Final = "colossalai/legacy/nn/layer/parallel_"
SOURCES: Final[Mapping[str, str]] = {
    "1": f"{LAYERS}1d/layers.py", "2": f"{LAYERS}2d/_operation.py", "2.5": f"{LAYERS}2p5d/_operation.py",
    "3": f"{LAYERS}3d/_operation.py",
}  # fmt: skip
"""The file of Colossal-AI 0.5.0 that has the autograd functions of each."""


class Grid(NamedTuple):
    """The tensor-parallel ranks: `depth` squares of `side` · `side`, a cube, or a line of `side` ranks."""

    dims: str
    side: int
    depth: int = 1

    @property
    def ranks(self) -> int:
        return {"1": self.side, "2": self.side**2, "2.5": self.depth * self.side**2, "3": self.side**3}[self.dims]

    @property
    def batch_parts(self) -> int:
        """Return the number of equal parts that a micro-batch is cut into between two layers."""
        return {"1": 1, "2": self.side, "2.5": self.depth * self.side, "3": self.side**2}[self.dims]

    @property
    def matrix_parts(self) -> int:
        """Return the number of equal parts of a linear layer's weight."""
        return {"1": self.side, "2": self.side**2, "2.5": self.side**2, "3": self.side**3}[self.dims]

    @property
    def hidden_unit(self) -> int:
        """Return the number that the hidden size has to be a multiple of."""
        return self.side if self.dims == "1" else self.side**2

    @property
    def ffn_unit(self) -> int:
        """Return the number that the width of the MLP has to be a multiple of."""
        return self.side if self.dims in ("1", "2.5") else self.side**2

    @property
    def vocab_unit(self) -> int:
        """Return the number that the rows of the vocabulary have to be a multiple of."""
        return self.side**2 if self.dims == "3" else self.side

    @property
    def groups(self) -> Mapping[str, int]:
        """Return the sizes of the groups that a rank sends in, by name."""
        if self.dims == "1":
            return {"all": self.side}
        if self.dims == "3":
            return {**dict.fromkeys(("input", "weight", "output"), self.side), "plane": self.side**2}
        return {"row": self.side, "column": self.side}

    @property
    def formula(self) -> str:
        """Return how the ranks are counted."""
        return {"1": "p", "2": "q²", "2.5": "d·q²", "3": "l³"}[self.dims]


def grid_of(dims: str, ranks: int, depth: int | None = None) -> Grid | None:
    """Return the grid of so many ranks; None if they form none. Without a depth, two and a half dimensions take the
    deepest grid that is not deeper than wide (1 <= d <= q in the Tesseract paper, arXiv:2105.14500)."""
    if dims == "1":
        return Grid(dims, ranks)
    if dims == "3":
        side = round(ranks ** (1 / 3))
        return Grid(dims, side) if side > 1 and side**3 == ranks else None
    depths = (1,) if dims == "2" else (depth,) if depth is not None else range(isqrt(ranks), 0, -1)
    for d in depths:
        side = isqrt(ranks // d)
        if side > 1 and d * side**2 == ranks and (depth is not None or d <= side):
            return Grid(dims, side, d)
    return None


def near(dims: str, ranks: int, depth: int | None = None) -> list[int]:
    """Return the nearest numbers of ranks, below and above, that form a grid."""

    def count(side: int) -> int:
        return side**3 if dims == "3" else side**2 * (depth or 1)

    if dims == "2.5" and depth is None:
        known = sorted({d * q * q for q in range(2, isqrt(ranks) + 3) for d in range(1, q + 1)})
    else:
        known, side = [count(2)], 2
        while known[-1] <= ranks:
            side += 1
            known.append(count(side))
    return [*[n for n in known if n < ranks][-1:], *[n for n in known if n > ranks][:1]]
