"""Optimizers that an engine does not run, or is not modelled with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from memcalc.inputs.model import Model


def check_optimizer_of_layers(options: Options, model: Model) -> None:
    """Raise InputError for an optimizer that finds none of its layers (transformers' trainer_optimizer.py,
    _setup_low_rank_optimizer)."""
    optimizer = OPTIMIZERS[options.optimizer]
    if optimizer.takes_linear_layers_alone and model.support.conv1d:
        why = f"takes nn.Linear alone, and the layers of a {model.model_type} are Conv1D"
        refuse("optimizer", optimizer.name, f"{why}; allowed: another one")


def check_optimizer_of_deepspeed(options: Options, *, states_only: bool) -> None:
    """Raise InputError for an optimizer that needs whole matrices, and for one that stage 0 is not modelled with."""
    optimizer = OPTIMIZERS[options.optimizer]
    if not optimizer.takes_flat:
        why = f"needs whole matrices, and deepspeed's partitions are flat; {NOT_YET}another one"
        refuse("optimizer", optimizer.name, why)
    if options.zero == 0 and not states_only and not optimizer.takes_stage_0:
        allowed = ", ".join(name for name, one in OPTIMIZERS.items() if one.takes_flat and one.takes_stage_0)
        why = f"with DeepSpeed's stage 0 {NOT_YET}{allowed}, or --zero 1 to 3"
        refuse("optimizer", optimizer.name, why)
