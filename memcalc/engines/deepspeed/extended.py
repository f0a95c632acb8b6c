"""The holdings of a rank whose optimizer or weights the host keeps, or that runs ZeRO++. All are rare and imported on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.core.rows import Row
    from memcalc.engines.base.holdings import Holdings
    from memcalc.engines.deepspeed.zero3_step import ZeRO3
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup


def stages_1_2(model: Model, setup: Setup) -> Holdings:
    """Return what a rank holds in stages 1 and 2 with the optimizer on the host."""
    from memcalc.engines.deepspeed.offloaded_1_2 import holdings

    return holdings(model, setup)


def stage_3(model: Model, setup: Setup, held: Holdings, kept: list[Row], over: ZeRO3) -> Holdings:
    """Return what a rank holds in stage 3. `held` is what it holds by itself, and `over` what it does while a run goes on."""
    if setup.is_zero_plus_plus:
        from memcalc.engines.deepspeed.zero_plus_plus_held import holdings

        return holdings(model, setup, held, over)
    if setup.offload_params != "none":
        from memcalc.engines.deepspeed import offloaded_params

        return offloaded_params.on_gpu(model, setup, held, over)
    from memcalc.engines.deepspeed.offloaded_3 import on_gpu

    return on_gpu(model, setup, held, kept, over)
