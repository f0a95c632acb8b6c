"""Optimizers that an engine does not run, or is not modelled with."""

from __future__ import annotations

from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.optimizers import OPTIMIZERS


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
