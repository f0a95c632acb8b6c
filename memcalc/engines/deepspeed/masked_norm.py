"""The norm of stage 0's flat gradient if ranks are parts of a model or share sequences. Its optimizer treats both alike
(fp16/fused_optimizer.py).

The first rank counts the weights that several ranks have whole; the others mask them. The ranges of such weights are
recorded in the first step and kept. The masking ranks need more memory than the first, and are reported.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import DType, boolean, fp32, int64
from memcalc.core.rows import Component, Row

if TYPE_CHECKING:
    from memcalc.families.base.module import Weight
    from memcalc.inputs.model import Model

_SOURCE: Final = "deepspeed/runtime/utils.py, get_flattened_grad_norm"


def kept_ranges(model: Model) -> Row:
    """Return the first and last element of every masked stretch of the flat gradient, in int64."""
    return _row("buffers", "ranges that the norm leaves out", _ends(model), int64, "always")


def masked_norm(model: Model) -> list[Row]:
    """Return the rows alive while the mask is made, most at its end: the flat gradient, the ends, their sums, and the
    mask. The flat gradient alone if no weight is masked."""
    elements, life = model.trainable_parameters, "within the step"
    places = Dim("(parameters+1)", elements + 1)
    flat = _row("temporaries", "gradients flattened in fp32", Dim("parameters", elements), fp32, life)
    if not _ends(model).size:
        return [flat]
    return [
        flat,
        _row("temporaries", "mask of the norm: signs", _ends(model), fp32, life),
        *(_row("temporaries", f"mask of the norm: {name}", places, fp32, life) for name in ("ends", "sums")),
        _row("temporaries", "mask of the norm", places, boolean, life),
    ]


def _ends(model: Model) -> Dim:
    """Return two ends for every stretch of whole weights among those that the optimizer has: each has a gradient, of zeros where
    backward makes none (_get_gradients_for_reduction)."""
    trained = filter(model.program.wants_gradient, model.program.weights())
    return Dim("ends", 2 * sum(whole for whole, _ in groupby(trained, key=_is_whole)))


def _is_whole(weight: Weight) -> bool:
    """Tell whether a rank has the whole weight."""
    return not any(part.name.endswith("/tp") for dim in weight.shape for part in dim.parts)


def _row(component: Component, name: str, dim: Dim, dtype: DType, life: str) -> Row:
    return Row(component, name, (dim,), dtype, life=life, basis="modelled", source=_SOURCE)
