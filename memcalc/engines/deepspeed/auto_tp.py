"""One rank's part of transformers' modules under DeepSpeed's AutoTP, and what its layers have sent in a run.

DeepSpeed's engine sees the part as the model: ZeRO shards it over the ranks that have the same part, and the parts agree on
overflows and norms as slices of a model do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.engines.base.sent import Group, collectives_of_run
from memcalc.engines.deepspeed.megatron_deepspeed import over_model_parallel_ranks
from memcalc.inputs.model import Model
from memcalc.layout.auto_tp import SOURCE, on_rank

if TYPE_CHECKING:
    from memcalc.layout.collectives import Collective
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile


def part_of(model: Model, setup: Setup) -> Model:
    """Return the model of one rank."""
    key = "AutoTP's part", setup.tp
    if key not in model.profiles:
        assert model.support.tensor_parallel is not None
        own = on_rank(model.program, model.support.tensor_parallel, setup.tp)
        model.profiles[key] = Model(model.name, model.model_type, own)
        model.profiles[key].tuning = model.tuning
    return model.profiles[key]


def collectives_of(setup: Setup, made: Profile, layers: str) -> list[Collective]:
    """Return what the layers have sent, and the single numbers of the step."""
    return [
        *collectives_of_run(made, setup, layers, {"tp": Group("tp", setup.tp, SOURCE)}),
        *over_model_parallel_ranks(setup),
    ]
