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


def in_files(model: Model, setup: Setup, rank: Rank) -> list[Transfer]:
    """Return what a rank reads from files and writes to them in a step; none if nothing is there."""
    if "nvme" not in (setup.offload_optimizer, setup.offload_params):
        return []
    from memcalc.engines.deepspeed import swapped, swapped_params

    of_optimizer = swapped.of_step(model, setup) if setup.offload_optimizer == "nvme" else []
    if setup.offload_params != "nvme":
        return of_optimizer
    return [*swapped_params.of_step(model, setup, rank.profiles[0].run.sent), *of_optimizer]
