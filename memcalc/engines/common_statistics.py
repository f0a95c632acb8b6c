"""Batch norms whose statistics are of all data-parallel ranks' batches (nn.SyncBatchNorm): the rank's program, and what
it sends."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.ops.sync_batch_norm import AXIS
from memcalc.engines.base.sent import Group, collectives_of_run
from memcalc.inputs.model import Model

if TYPE_CHECKING:
    from memcalc.layout.collectives import Collective
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile

SOURCE: Final = "torch/nn/modules/_functions.py"


def rank_of(model: Model, setup: Setup) -> Model:
    """Return the model of one of the ranks that share statistics; the model itself if there is nothing to share."""
    program: Any = model.program
    if setup.dp == 1 or not program.sync_batch_norm:
        return model
    key = "common statistics", setup.dp
    if key not in model.profiles:
        own = copy.copy(program)
        own.data_parallel = setup.dp
        model.profiles[key] = made = Model(model.name, model.model_type, own, model.fields, model.notes)
        made.tuning = model.tuning
    return model.profiles[key]


def collectives_of(setup: Setup, made: Profile) -> list[Collective]:
    """Return the gathers of forward and the sums of backward."""
    return collectives_of_run(made, setup, "", {AXIS: Group("dp", setup.dp, SOURCE)})
