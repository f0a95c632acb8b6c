"""Tensors in fp8 as Transformer Engine's quantizers make them (transformer_engine/pytorch/csrc/quantizer.cpp), over sizes.

A product needs its two operands along the dim that it sums over. `rows` are what the forward's product takes, `columns` what the
gradient of a weight takes. With one scale for a whole tensor (`delayed`, `tensorwise`) a GPU whose products take any layout has
both in one tensor; Hopper and Ada have a transposed copy. With a scale for each block (`blockwise`, `mxfp8`) both have values of
their own on every GPU. A scale of a whole tensor is left out: 4 bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import Dim, Shape
from memcalc.core.dtypes import DType, fp8, fp32, uint8
from memcalc.core.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.core.tensor import Memory

RECIPES: Final = ("delayed", "tensorwise", "blockwise", "mxfp8")
"""The values of `--fp8-recipe` that are modelled (megatron/core/enums.py, Fp8Recipe), its default first."""
_SCALES: Final[dict[str, tuple[int, DType]]] = {"blockwise": (128, fp32), "mxfp8": (32, uint8)}
"""The elements that have a scale in common in an activation, and the dtype of the scale."""


class Recipe(NamedTuple):
    """How tensors are cast to fp8."""

    name: str
    any_layout: bool
    """True if the GPU's products in fp8 take operands of any layout: from Blackwell on."""

    @property
    def by_block(self) -> bool:
        """Tell whether each block of a tensor has a scale."""
        return self.name in _SCALES

    @property
    def fuses_norms(self) -> bool:
        """Tell whether the kernel of a norm writes its output in fp8; others write it in 16 bits before."""
        return self.name == "delayed"

    def parts(self, shape: Shape, kind: str) -> list[tuple[Shape, DType, str]]:
        """Return the shapes of the data of an activation in one direction, and of its scales."""
        out: list[tuple[Shape, DType, str]] = [(shape, fp8, f"fp8 {kind}")]
        if self.by_block:
            block, dtype = _SCALES[self.name]
            out.append(((*shape[:-1], _blocks(shape[-1], block)), dtype, f"scales of the {kind}"))
        return out

    def quantized(self, memory: Memory, shape: Shape, *, rows: bool = True, columns: bool = True) -> Quantized:
        """Allocate a tensor in fp8 with its rows, its columns, or both."""
        of_rows = self._made(memory, shape, "rows") if rows or self._is_one else []
        of_columns = (of_rows if self._is_one else self._made(memory, shape, "columns")) if columns else []
        return Quantized(of_rows, of_columns)

    def settled(self, memory: Memory, x: Quantized, shape: Shape) -> Quantized:
        """Bring a gathered tensor into the layout of a product: columns are made of rows, or columns and scales that
        were gathered block by block are transposed into new ones (`_post_process_fp8_blockwise_gather`)."""
        if self.name == "blockwise":
            if x.columns:
                x.columns[0] = new_tensor(memory, *self.parts(shape, "columns")[0])
            if x.rows:
                x.rows[1] = new_tensor(memory, *self.parts(shape, "rows")[1])
            return x
        if self.by_block:
            return x
        if self.any_layout:
            return Quantized(x.rows, x.rows)
        return x if x.columns else x._replace(columns=self._made(memory, shape, "columns"))

    @property
    def _is_one(self) -> bool:
        return self.any_layout and not self.by_block

    def _made(self, memory: Memory, shape: Shape, kind: str) -> list[Tensor]:
        return [new_tensor(memory, *part) for part in self.parts(shape, kind)]


class Quantized(NamedTuple):
    """A tensor in fp8: data and scales in each direction. The two may be the same."""

    rows: list[Tensor]
    columns: list[Tensor]


@lru_cache(maxsize=1024)
def _blocks(dim: Dim, block: int) -> Dim:
    return Dim(f"⌈{dim.name}/{block}⌉", -(-dim.size // block))
