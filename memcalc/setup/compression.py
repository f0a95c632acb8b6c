"""Options of compressed communication: DDP's communication hooks, DeepSpeed's 1-bit optimizers, and the phase of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypedDict

from memcalc.inputs.options import refuse

if TYPE_CHECKING:
    from memcalc.inputs.options import Options

POWER_SGD: Final = ("powersgd", "batched-powersgd")
"""The hooks that approximate gradients by matrices of a low rank, after a warm-up."""
ONE_BIT: Final = ("onebit-adam", "onebit-lamb", "zero-one-adam")
"""The optimizers that send signs, after a warm-up."""


class Compression(TypedDict):
    """The options as resolved, by their names in a setup."""

    comm_hook: str | None
    powersgd_rank: int | None
    compression_phase: str | None


def compression_options(options: Options, engine: str) -> Compression:
    """Return the options as resolved. Raise InputError for one that does not go with the engine, hook or optimizer."""
    hook, rank = options.comm_hook, options.powersgd_rank
    if hook is not None and engine != "ddp":
        refuse("comm_hook", hook, "is an option of DDP (register_comm_hook); allowed: with --engine ddp")
    if rank is not None and hook not in POWER_SGD:
        refuse("powersgd_rank", rank, f"is an option of PowerSGD; allowed: with --comm-hook {' or '.join(POWER_SGD)}")
    return {
        "comm_hook": hook,
        "powersgd_rank": (rank or 1) if hook in POWER_SGD else None,
        "compression_phase": _phase(options),
    }


def _phase(options: Options) -> str | None:
    """Return the phase that is reported; None if nothing is compressed after a warm-up."""
    phase = options.compression_phase
    if options.comm_hook in POWER_SGD or options.optimizer in ONE_BIT:
        return phase or "compressed"
    if phase is not None:
        hooks, optimizers = " or ".join(POWER_SGD), " or ".join(ONE_BIT)
        why = "is of communication that is compressed after a warm-up"
        refuse("compression_phase", phase, f"{why}; allowed: with --comm-hook {hooks}, or --optimizer {optimizers}")
    return None
