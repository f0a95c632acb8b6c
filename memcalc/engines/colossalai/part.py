"""One rank's part of a model, as Colossal-AI's legacy layers cut it, and what its layers have sent in a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.engines.base.sent import Group, collectives_of_run
from memcalc.families.base.architecture import architecture_of
from memcalc.inputs.model import Model
from memcalc.kernels import Kernels
from memcalc.layout.tensor_dims.gpt import SOURCE, GridGPT
from memcalc.layout.tensor_dims.grid import SOURCES, Grid, grid_of

if TYPE_CHECKING:
    from memcalc.layout.collectives import Collective
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile

KERNELS: Final = Kernels((), SOURCE, "modelled")
"""The program is written with Colossal-AI's functions, nothing is replaced."""
LAYERS: Final = "blocks.*"


def grid(setup: Setup) -> Grid:
    """Return the grid that the tensor-parallel ranks form."""
    found = grid_of(setup.tp_dims, setup.tp, setup.tp_depth)
    assert found is not None
    return found


def part_of(model: Model, setup: Setup) -> Model:
    """Return the model of one rank."""
    own = grid(setup)
    key = "part of a grid", own, setup.has_master_weights
    if key not in model.profiles:
        a = architecture_of(model.model_type, model.program.config)
        program = GridGPT(model.program.config, a, own, casts_logits=setup.has_master_weights)
        model.profiles[key] = Model(model.name, model.model_type, program)
    return model.profiles[key]


def collectives_of_layers(setup: Setup, made: Profile) -> list[Collective]:
    """Return what the layers have sent, over each group of the grid."""
    own = grid(setup)
    groups = {name: Group("tp", ranks, SOURCES[own.dims]) for name, ranks in own.groups.items()}
    found: list[Collective] = []
    for name, group in groups.items():
        along = "" if name == "all" else f", along the {_EDGES.get(name, name)}"
        sent = collectives_of_run(made, setup, LAYERS, {name: group})
        found += [one._replace(name=f"{one.name}{along}") for one in sent]
    return found


_EDGES: Final = {"input": "input's edge", "weight": "weight's edge", "output": "output's edge"}
