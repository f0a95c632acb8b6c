"""DeepSpeed over sequences that ranks share (`--cp`): a rank's program, and what it sends besides ZeRO's collectives.

ZeRO shards and averages over all ranks, including those of a sequence (deepspeed/utils/groups.py,
_get_sequence_data_parallel_group).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

from memcalc.engines.base.sent import Group, collectives_of_run
from memcalc.engines.deepspeed.zero_layout import STAGE_0
from memcalc.inputs.model import Model
from memcalc.kernels.ulysses import SOURCE
from memcalc.layout.collectives import Collective
from memcalc.layout.ulysses import Ulysses

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile

AXIS: Final = "cp"


def rank_of(model: Model, setup: Setup) -> Model:
    """Return the model as one of the ranks of a sequence runs it."""
    key = "rank of a sequence", setup.cp
    if key not in model.profiles:
        own: Any = copy.copy(model.program)
        own.context_parallel = Ulysses(setup.cp)
        model.profiles[key] = Model(model.name, model.model_type, own)
    return model.profiles[key]


def collectives_of(model: Model, setup: Setup, profile: Profile) -> list[Collective]:
    """Return the collectives of the model's attention and loss in a run, and single numbers in stage 0's step."""
    layers = next(w.name.split("*")[0] + "*" for w in model.weight_classes if w.layer is not None)
    sent = collectives_of_run(profile, setup, layers, {AXIS: Group(AXIS, setup.cp, SOURCE)})
    return [*sent, *_agreed_upon(setup)]


def _agreed_upon(setup: Setup) -> list[Collective]:
    """Return the all-reduces by which ranks agree on an overflow and on the norm. Stage 0's optimizer takes the ranks
    of a sequence for those of a model (parallel_state_sp.py)."""
    if setup.zero or not setup.has_master_weights:
        return []
    numbers = (("overflow check", "uint8", 1), ("gradient norm", "fp32", 4))
    return [
        Collective(
            AXIS, "all_reduce", f"{name} of a sequence's ranks", "step", dtype, setup.cp, 1, size, f"1·{size} B",
            source=STAGE_0,
        )
        for name, dtype, size in numbers
    ]  # fmt: skip
