"""The optimizer and clipping in training arguments that are written.

Source: transformers/training_args.py (OptimizerNames), transformers/trainer_optimizer.py of 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memcalc.formats.accelerate_part import Part

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup

_TORCHS: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = {
    "adamw": {"fused": {}, "foreach": {"optim": "adamw_torch"}},
    "sgd": {"foreach": {"optim": "sgd"}},
    "sgd-momentum": {"foreach": {"optim": "sgd", "optim_args": "momentum=0.9"}},
}
"""The keys of torch's optimizers, each with the implementations that the Trainer can ask for."""
_NAMES: Final[Mapping[str, str]] = {
    "adafactor": "adafactor", "adamw-8bit": "adamw_bnb_8bit", "paged-adamw": "paged_adamw_32bit",
    "paged-adamw-8bit": "paged_adamw_8bit", "lion": "lion_32bit", "lion-8bit": "lion_8bit",
    "paged-lion": "paged_lion_32bit", "paged-lion-8bit": "paged_lion_8bit", "galore-adamw": "galore_adamw",
    "apollo-adamw": "apollo_adamw", "lomo": "lomo", "adalomo": "adalomo",
}  # fmt: skip
"""The other optimizers that the Trainer makes."""
_LOW_RANK: Final = ("galore-adamw", "apollo-adamw")
_WITHIN_LAYERS: Final = r".*\.\d+\..*"
"""A pattern of the modules inside the layers, which are numbered."""
_WHY: Final[Mapping[str, str]] = dict.fromkeys(
    ["optimizer", "optimizer_implementation"], "the script hands the optimizer to the Trainer (optimizers=...)"
)


def optimizer_part(setup: Setup) -> Part:
    """Return the optimizer that the Trainer makes. Of torch's it chooses the implementation itself."""
    name = setup.optimizer
    if name in _TORCHS:
        ways = _TORCHS[name]
        if setup.optimizer_implementation in ways:
            return Part(ways[setup.optimizer_implementation], frozenset({"optimizer", "optimizer_implementation"}))
        return Part(ways["foreach"], frozenset({"optimizer"}), {"optimizer_implementation": "foreach"}, _WHY)
    if name not in _NAMES or (name == "lion" and setup.precision in ("bf16", "fp16")):  # bitsandbytes' state is fp32
        return Part({}, frozenset(), {"optimizer": "adamw", "optimizer_implementation": "fused"}, _WHY)
    keys: dict[str, Any] = {"optim": _NAMES[name]}
    if name in _LOW_RANK:
        keys["optim_target_modules"] = _WITHIN_LAYERS
    return Part(keys, frozenset({"optimizer"}), {}, _WHY)


def clipping_part(setup: Setup) -> Part:
    """Return the largest norm of the gradients: by default it is 1, and 0 switches clipping off."""
    return Part({} if setup.clip_grad_norm else {"max_grad_norm": 0.0}, frozenset({"clip_grad_norm"}))
