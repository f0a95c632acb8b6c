"""Liger-Kernel in training arguments that are written: use_liger_kernel and liger_kernel_config.

Source: transformers/integrations/liger.py of 5.23; liger_kernel/transformers/monkey_patch.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memcalc.formats.accelerate_part import Part
from memcalc.kernels.liger_parts import SEPARATORS, parts_of
from memcalc.tasks import OF_TRL

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_LOSSES: Final[Mapping[str, Mapping[str, bool]]] = {
    "fused": {},
    "liger": {"cross_entropy": True, "fused_linear_cross_entropy": False},
    "eager": {"fused_linear_cross_entropy": False},
}
"""Liger's switches of its two losses; the one that takes the head is on by default."""
_WHY: Final[Mapping[str, str]] = {"cross_entropy": "the script hands the loss to the Trainer (compute_loss_func=...)"}


def kernels_part(setup: Setup, model: Model) -> Part:
    """Return the parts of Liger-Kernel that are on. Its loss alone is Liger-Kernel without any part of the layers."""
    if setup.task in OF_TRL or (setup.kernels != "fused" and setup.cross_entropy not in ("fused", "liger")):
        return Part({}, frozenset(), {}, _WHY)
    on = (setup.liger or "").split(SEPARATORS[0])
    parts = parts_of(model.model_type)
    config: dict[str, Any] = {part: part in on for part in parts} if set(on) != set(parts) else {}
    loss = setup.cross_entropy or "eager"
    config |= _LOSSES.get(loss, _LOSSES["eager"])
    keys: dict[str, Any] = {"use_liger_kernel": True, **({"liger_kernel_config": config} if config else {})}
    said = frozenset({"kernels", "liger"})
    if loss in _LOSSES:
        return Part(keys, said | {"cross_entropy"})
    return Part(keys, said, {"cross_entropy": "eager"}, _WHY)
