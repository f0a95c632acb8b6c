"""The least seconds that follow a step's forwards and backwards: the reduction of gradients and the optimizer's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.hardware.cost import Unknown as NoCost
from memcalc.hardware.cost import cost_of
from memcalc.planning.probes import EXACT
from memcalc.timing.kernels import Unknown
from memcalc.timing.optimizer import flat, updates
from memcalc.timing.step import rates_of

if TYPE_CHECKING:
    from memcalc.inputs.gpu import GPU
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup


def least_after_passes(model: Model, setup: Setup, gpu: GPU) -> float:
    """Return the seconds of Megatron's smallest stage; 0.0 for other engines, which hide a part behind the backward.

    Megatron's reductions over data-parallel ranks are exposed.
    """
    if setup.engine != "megatron":
        return 0.0
    from memcalc.engines.megatron.collectives import data_parallel
    from memcalc.engines.megatron.engine import buffers_of, smallest_stage

    stage = smallest_stage(model, setup)
    costs = [cost_of(collective, setup, gpu) for collective in data_parallel(setup, stage)]
    sending = sum(cost.seconds for cost in costs if not isinstance(cost, NoCost))
    elements = sum(one.elements // (one.ranks if setup.zero else 1) for one in buffers_of(setup, stage))
    updating = updates(setup, [flat(elements)], setup.compute_dtype, rates_of(setup, gpu))
    return EXACT * (sending + (0.0 if isinstance(updating, Unknown) else sum(item.seconds for item in updating)))
