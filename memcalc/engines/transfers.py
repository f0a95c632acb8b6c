"""Returns what the ranks of an engine copy between GPU and host in a step, where that is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.engines.rank import Rank
    from memcalc.inputs.model import Model
    from memcalc.offload.transfers import Transfer
    from memcalc.setup.setup import Setup


def transfers(model: Model, setup: Setup, rank: Rank) -> list[Transfer]:
    """Return the copies of a rank whose weights are on the host; none for other ranks."""
    if setup.offload_params == "none":
        return []
    run = rank.profiles[0].run
    if setup.engine == "fsdp2":
        from memcalc.engines.fsdp2 import offloaded

        return offloaded.transfers(model, setup, run, rank.holdings.micro_batches)
    from memcalc.engines.deepspeed.offloaded_moved import of_run

    return of_run(model, setup, run.sent)
