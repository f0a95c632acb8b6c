"""The weights of layers that multiply in fp8 (`memcalc.megatron.fp8`).

Without `--fp8-param-gather` a layer keeps its weight in fp8 beside the 16-bit one, for all micro-batches and steps
(`_fp8_workspaces` in transformer_engine/pytorch/module/base.py). With it the weight is in fp8 alone: its rows are in the
distributed optimizer's flat buffer, whose gather sends them, and its columns beside (megatron/core/fp8_utils.py,
post_all_gather_processing). Main weights are fp32 in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.dims import Dim, Shape
from memcalc.core.dtypes import DType, fp8, fp32, uint8
from memcalc.core.rows import Row
from memcalc.megatron.fp8_model import in_fp8

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.families.base.module import Weight
    from memcalc.megatron.fp8 import Recipe

_SOURCE: Final = "transformer_engine/pytorch/module/base.py, get_weight_workspace; pytorch/csrc/quantizer.cpp"


def rows_of(recipe: Recipe, weights: Mapping[Weight, int], *, gathered: bool) -> list[Row]:
    """Return what a stage holds of its weights in fp8, besides what `gathered` ones have in the place of 16 bits."""
    out: list[Row] = []
    for weight, count in weights.items():
        if not in_fp8(weight):
            continue
        kinds = ["rows"] * (not gathered) + ["columns"] * (recipe.by_block or not recipe.any_layout)
        for kind in kinds:
            out.append(_row(f"{weight.name}: fp8 {kind}", weight.shape, fp8, count))
        scaled = ["rows"] * recipe.by_block + ["columns"] * recipe.by_block
        out += [
            _row(f"{weight.name}: scales of the {kind}", *_scales(recipe, weight.shape, kind), count) for kind in scaled
        ]
    return out


def by_dtype(weights: Mapping[Weight, int], dtype: DType) -> list[tuple[str, dict[Weight, int], DType]]:
    """Return the flat buffers of weights of which some are in fp8 alone: the name, the weights and the dtype of each."""
    apart = {
        "weights": ({w: n for w, n in weights.items() if not in_fp8(w)}, dtype),
        "fp8 weights": ({w: n for w, n in weights.items() if in_fp8(w)}, fp8),
    }
    return [(name, own, kind) for name, (own, kind) in apart.items() if own]


def _row(name: str, shape: Shape, dtype: DType, count: int) -> Row:
    return Row("buffers", name, shape, dtype, count, "always", "modelled", _SOURCE)


def _scales(recipe: Recipe, shape: Shape, kind: str) -> tuple[Shape, DType]:
    """Return the scales of a weight: of squares of 128 with `blockwise`, of 32 elements with `mxfp8`, padded
    (`get_scale_shape`)."""
    *lead, out, given = shape
    outer, inner = (out, given) if kind == "rows" else (given, out)
    if recipe.name == "blockwise":
        return (*lead, _part(outer, 128, 1), _part(inner, 128, 4)), fp32
    if kind == "rows":
        return (*lead, _part(out, 1, 128), _part(given, 32, 4)), uint8
    return (*lead, _part(out, 32, 4), _part(given, 1, 128)), uint8


def _part(dim: Dim, block: int, unit: int) -> Dim:
    blocks = -(-dim.size // block)
    return Dim(dim.name if block == 1 else f"⌈{dim.name}/{block}⌉", -(-blocks // unit) * unit)
