"""Colossal-AI's training loop around a rank's part of a GPT: plain gradients and states, and one all-reduce of a flat copy of
all gradients (colossalai/legacy/engine/gradient_handler/utils.py, bucket_allreduce).

The layers' own buffers and collectives are in the run of the rank's program (memcalc/layout/tensor_dims). Weights, gradients
and states are those of plain PyTorch over the rank's part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.dims import Dim
from memcalc.core.rows import Row
from memcalc.engines import none as plain
from memcalc.engines.base.holdings import Holdings, weight_rows
from memcalc.layout.collectives import Collective

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_BUCKET: Final = "colossalai/legacy/engine/gradient_handler/utils.py bucket_allreduce"
_TESSERACT: Final = "arXiv:2105.14500 (Tesseract): gradients of the weights that d squares have in common are added up"


def holdings(model: Model, setup: Setup) -> Holdings:
    """Return what a rank holds: plain PyTorch's rows over its part, and the flat copy behind backward."""
    held = plain.holdings(model, setup)
    if _copies(setup) == 1:
        return held
    gradients = tuple(weight_rows(model, setup.compute_dtype, "gradients", "backward to step"))
    width = (Dim("parameters of the rank", model.trainable_parameters),)
    flat = Row(
        "buffers", "flat copy of all gradients", width, setup.compute_dtype, 1, "end of backward", "modelled", _BUCKET
    )
    return held._replace(after_backward=((*gradients, flat),), order=None)


def _copies(setup: Setup) -> int:
    """Return the number of ranks that have the same weights and other sequences."""
    return setup.dp * (setup.tp_depth or 1)


def collectives(model: Model, setup: Setup) -> list[Collective]:
    """Return the reductions of gradients: over the squares of two and a half dimensions, and over data-parallel ranks."""
    depth = setup.tp_depth or 1
    return [
        *([_reduction(model, setup, "tp", depth, "gradients, along the depth", _TESSERACT)] if depth > 1 else []),
        *([_reduction(model, setup, "dp", setup.dp, "gradients, one flat copy", _BUCKET)] if setup.dp > 1 else []),
    ]


def _reduction(model: Model, setup: Setup, axis: str, ranks: int, name: str, source: str) -> Collective:
    dtype = setup.compute_dtype
    payload = model.trainable_parameters * dtype.itemsize
    formula = f"parameters of the rank·{dtype.itemsize} B = {payload} B"
    return Collective(axis, "all_reduce", name, "backward", dtype.name, ranks, 1, payload, formula, source=source)


def textbook(model: Model, setup: Setup) -> list[Collective]:
    return []
