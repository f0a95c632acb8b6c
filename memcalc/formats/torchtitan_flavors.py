"""The torchtitan flavor that has the sizes of a model.

Source: torchtitan/models/*/__init__.py of v0.2.2, which has no Llama 2 any more.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.errors import InputError
from memcalc.formats.torchtitan_models import NAMES, TitanModel, flavors, titan_model
from memcalc.inputs.model import load_model

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

WRITTEN_NAMES: Final = tuple(name for name in NAMES if name != "llama2")
_COMPARED_OTHERWISE: Final = (
    "head_dim", "layer_types", "max_position_embeddings", "max_window_layers", "num_key_value_heads", "pad_token_id",
    "partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
)  # fmt: skip
"""The fields of a config.json that change no size, or that several values can mean the same of."""


class Flavor(NamedTuple):
    """A model that torchtitan builds, by the names that its file has."""

    name: str
    flavor: str
    model: TitanModel


def flavor_of(model: Model, seq_len: int) -> Flavor:
    """Return the flavor with the sizes of a model. Raises InputError that names the flavors if there is none."""
    own = model.whole
    for name in WRITTEN_NAMES:
        for flavor in flavors(name):
            made = titan_model(name, flavor, seq_len)
            if made is not None and _may_be(own, made) and _sizes(load_model(made.config)) == _sizes(own):
                return Flavor(name, flavor, made)
    known = "; ".join(f"{name} {', '.join(flavors(name))}" for name in WRITTEN_NAMES)
    raise InputError(f"--model {own.name}: torchtitan v0.2.2 has no flavor of these sizes; allowed: {known}")


def _may_be(model: Model, made: TitanModel) -> bool:
    """Tell whether two models are of one type and depth, before more is compared."""
    return model.model_type == made.config["model_type"] and model.layers == made.layers


def _sizes(model: Model) -> dict[str, Any]:
    """Return what decides the weights, the buffers and the calls of a model."""
    program: Any = model.program
    fields: dict[str, Any] = {
        name: value or None for name, value in asdict(program.config).items() if name not in _COMPARED_OTHERWISE
    }
    buffers = [(buffer.name, [dim.size for dim in buffer.shape], buffer.layer) for buffer in program.buffers()]
    kinds = [program.layer_kind(i) for i in range(program.layers)]
    updates = program.rope_type if program.rope_type in ("dynamic", "longrope") else None
    return {**fields, "weights": model.weights(), "buffers": buffers, "kinds": kinds, "updates": updates}
