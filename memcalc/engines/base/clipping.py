"""`torch.nn.utils.clip_grad_norm_` between backward and step: the collectives of its norms where gradients are shards.

There is one number per parameter, in the gradients' dtype. The norms of DTensors are partial sums. They are stacked
into one tensor and summed over each mesh axis that shards them in turn (torch/nn/utils/clip_grad.py, _get_total_norm).
Replicas of hybrid sharding have the same sums. The numbers and the optimizer's own temporaries are not alive together,
so the numbers count only where a step has smaller temporaries, as a fused one.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import Dim
from memcalc.core.rows import Row
from memcalc.layout.collectives import Collective

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.core.dtypes import DType
    from memcalc.families.base.module import Weight
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_SOURCE: Final = "torch/nn/utils/clip_grad.py"
_TITAN: Final = "torchtitan/distributed/utils.py, clip_grad_norm_"
_LIFE: Final = "while gradients are clipped"
_PARTIAL: Final = "torch/distributed/tensor/_ops/_math_ops.py, _NormPartial"


def norms(model: Model, setup: Setup, dtype: DType) -> list[Collective]:
    """Return the all-reduces of the gradients' norms; none if nothing is clipped or no gradient is sharded."""
    if not setup.clip_grad_norm:
        return []
    tensors = _tensors(model)
    return [_all_reduce(axis, ranks, tensors, dtype) for axis, ranks in _cut(setup)]


def norm_over_stages(setup: Setup, dtype: DType) -> list[Collective]:
    """Return the all-reduce of a pipeline. Each stage has the norm of its gradients on all its ranks, and the stages
    sum the squares of their norms (torchtitan's clip_grad_norm_)."""
    if not setup.clip_grad_norm or setup.pp == 1:
        return []
    formula = f"{dtype.itemsize} B = {dtype.itemsize} B"
    name = "norm of all gradients over the stages"
    return [
        Collective("pp", "all_reduce", name, "step", dtype.name, setup.pp, 1, dtype.itemsize, formula, source=_TITAN)
    ]


def temporaries(
    model: Model, setup: Setup, dtype: DType, own_dtype: Callable[[Weight], DType | None] | None = None
) -> list[Row]:
    """Return the rows of clipping at its peak, without the gradients: when the norms become one, or when a mesh axis
    sums them. `own_dtype` tells the dtype of a gradient that is not `dtype`; the widest one is that of all norms together."""
    if not setup.clip_grad_norm:
        return []
    axes = len(_cut(setup))
    shape = (Dim("gradients", _tensors(model)),)
    counts: Counter[DType] = Counter()
    for weight in model.weight_classes:
        counts[(own_dtype(weight) if own_dtype is not None else None) or dtype] += model.trained(weight)
    rows = [
        Row("temporaries", "norm of each gradient", (), kind, count, _LIFE, "modelled", _SOURCE)
        for kind, count in counts.items()
        if count
    ]
    rows.append(Row("temporaries", "norms of the gradients", shape, dtype, 1, _LIFE, "modelled", _SOURCE))
    if not axes:
        return [*rows, Row("temporaries", "norm of all gradients", (), dtype, 1, _LIFE, "modelled", _SOURCE)]
    # Squares, their sums over the ranks and the roots of the sums; the next axis takes the roots.
    sums = "norms of the gradients: squares, sums and roots"
    return [*rows, Row("temporaries", sums, shape, dtype, 2 + axes, _LIFE, "modelled", _PARTIAL)]


def _tensors(model: Model) -> int:
    return sum(model.trained(w) for w in model.weight_classes)


def _cut(setup: Setup) -> list[tuple[str, int]]:
    """Return the axes that shard gradients, with their ranks."""
    axes = [("dp", setup.shards), ("tp", setup.tp)] if setup.engine == "fsdp2" else []
    return [(axis, ranks) for axis, ranks in axes if ranks > 1]


def _all_reduce(axis: str, ranks: int, tensors: int, dtype: DType) -> Collective:
    payload = tensors * dtype.itemsize
    formula = f"parameters·{dtype.itemsize} B = {tensors}·{dtype.itemsize} B"
    name = "norms of the gradients"
    return Collective(axis, "all_reduce", name, "step", dtype.name, ranks, 1, payload, formula, source=_SOURCE)
