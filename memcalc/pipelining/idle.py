"""The time that the ranks of a pipeline wait for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.megatron.schedules import bubble
from memcalc.pipelining import orders
from memcalc.pipelining.schedules import NAMES

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup


def idle_share(setup: Setup) -> float:
    """Return the pipeline's bubble over the ideal time of a step, if all stages took equally long; 0 without stages."""
    if setup.pp == 1:
        return 0.0
    of_engine = orders.bubble if setup.engine == "fsdp2" or setup.schedule in NAMES else bubble
    return of_engine(setup.schedule, setup.pp, setup.micro_batches, setup.virtual_stages)
