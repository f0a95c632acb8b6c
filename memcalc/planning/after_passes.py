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
    from memcalc.layout.collectives import Collective
    from memcalc.setup.setup import Setup


def least_after_passes(model: Model, setup: Setup, gpu: GPU) -> float:
    """Return the seconds of the smallest stage: Megatron's, or those of FSDP2's pipelines. Return 0.0 for other engines, which
    hide a part behind the backward."""
    if setup.engine == "megatron":
        return _of_megatron(model, setup, gpu)
    return _of_stages(model, setup, gpu) if setup.engine == "fsdp2" and setup.pp > 1 else 0.0


def _of_megatron(model: Model, setup: Setup, gpu: GPU) -> float:
    """Return the reductions over data-parallel ranks, which are exposed, and the optimizer's step."""
    from memcalc.engines.megatron.collectives import data_parallel
    from memcalc.engines.megatron.engine import buffers_of, smallest_stage

    stage = smallest_stage(model, setup)
    sending = _seconds(data_parallel(setup, stage), setup, gpu)
    elements = sum(one.elements // (one.ranks if setup.zero else 1) for one in buffers_of(setup, stage))
    updating = updates(setup, [flat(elements)], setup.compute_dtype, rates_of(setup, gpu))
    return EXACT * (sending + (0.0 if isinstance(updating, Unknown) else sum(item.seconds for item in updating)))


def _of_stages(model: Model, setup: Setup, gpu: GPU) -> float:
    """Return the gathers of a stage's weights that its computing waits for."""
    from memcalc.engines.fsdp2.pipeline import staged_ranks
    from memcalc.engines.fsdp2.pipeline_sent import of_units
    from memcalc.engines.ranks import parts_of

    own = next(iter(parts_of(model, setup).values()))  # ranks that share sequences have the same weights
    ranks = (of_units(setup, rank) for rank in staged_ranks(own, setup))
    exposed = ([one for one in sent if one.overlap == "exposed"] for sent in ranks)
    return EXACT * min(_seconds(sent, setup, gpu) for sent in exposed)


def _seconds(sent: list[Collective], setup: Setup, gpu: GPU) -> float:
    costs = [cost_of(collective, setup, gpu) for collective in sent]
    return sum(cost.seconds for cost in costs if not isinstance(cost, NoCost))
