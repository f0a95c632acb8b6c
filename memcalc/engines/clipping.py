"""`torch.nn.utils.clip_grad_norm_` between backward and step: what its norms send where gradients are shards.

One number per parameter, in the gradients' dtype; their norms over DTensors are partial sums, stacked into one tensor
and summed over each mesh axis that cuts them in turn (torch/nn/utils/clip_grad.py, _get_total_norm). Replicas of hybrid
sharding have the same sums. The numbers themselves, a few kilobytes, are no rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.collectives import Collective

if TYPE_CHECKING:
    from memcalc.dtypes import DType
    from memcalc.inputs.model import Model
    from memcalc.setup import Setup

_SOURCE: Final = "torch/nn/utils/clip_grad.py"


def norms(model: Model, setup: Setup, dtype: DType) -> list[Collective]:
    """The all-reduces of the gradients' norms; none where nothing is clipped or no gradient is cut."""
    if not setup.clip_grad_norm:
        return []
    tensors = sum(model.trained(w) for w in model.weight_classes)
    cut: list[tuple[str, int]] = [("dp", setup.shards), ("tp", setup.tp)]
    return [_all_reduce(axis, ranks, tensors, dtype) for axis, ranks in cut if ranks > 1]


def _all_reduce(axis: str, ranks: int, tensors: int, dtype: DType) -> Collective:
    payload = tensors * dtype.itemsize
    formula = f"parameters·{dtype.itemsize} B = {tensors}·{dtype.itemsize} B"
    name = "norms of the gradients"
    return Collective(axis, "all_reduce", name, "step", dtype.name, ranks, 1, payload, formula, source=_SOURCE)
