"""The linear layers and fused parameters that `--lora-targets` names, as peft matches them (peft/tuners/tuners_utils.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.errors import one_line
from memcalc.families.base.linear_modules import linear_modules
from memcalc.families.base.module import looks_tokens_up
from memcalc.inputs.options import NOT_YET, refuse
from memcalc.tuning.default_targets import HEADS, NOT_ALL, OF_MAMBA, TARGETS, WITHOUT
from memcalc.tuning.experts import fused_adapters, renamed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.families.base.linear_modules import Place
    from memcalc.families.base.module import LinearCall
    from memcalc.inputs.model import Model
    from memcalc.tuning.experts import FusedAdapter

ALL_LINEAR: Final = "all-linear"
DEFAULT: Final = "default"


class Targets(NamedTuple):
    """The layers and the parameters that get an adapter."""

    calls: Mapping[Place, LinearCall]
    parameters: Mapping[Place, tuple[FusedAdapter, ...]]


def adapted_by(model: Model, targets: str, rank: int) -> Targets:
    """Return what gets an adapter. Raises InputError if that is nothing, or for modules of other kinds."""
    without = WITHOUT.get(model.model_type, ())
    found = {place: call for place, call in linear_modules(model.program).items() if _name(place) not in without}
    if model.program.layers_share or not any(layer is not None for _, layer in found):
        refuse("lora_rank", rank, f"for the linear layers of a {model.model_type} {NOT_YET}0")
    if targets == ALL_LINEAR and model.model_type in OF_MAMBA:
        why = f"peft refuses out_proj of a {model.model_type}, whose weight is used by itself"
        refuse("lora_targets", targets, f"{why}; allowed: names such as {_some(found)}")
    if targets == ALL_LINEAR and model.model_type in NOT_ALL:
        why = f"for a {model.model_type}, not all of whose linear layers can have an adapter,"
        refuse("lora_targets", targets, f"{why} {NOT_YET}names such as {_some(found)}")
    moved = renamed(model.model_type)
    if targets == ALL_LINEAR and not moved:
        return Targets({place: call for place, call in found.items() if not _is_head(place, call)}, {})
    if targets == ALL_LINEAR:  # peft takes the last parts of all names for a list
        names = tuple(
            dict.fromkeys([*(_name(place) for place, call in found.items() if not _is_head(place, call)), *moved])
        )
    else:
        names = _names(model, targets, found)
    parameters = fused_adapters(model, names, rank, targets)
    own = [name for name in names if not any(name == old or name.endswith(f".{old}") for old in moved)]
    chosen = {place: call for place, call in found.items() if any(_matches(place, name) for name in own)}
    for name in own:
        if not any(_matches(place, name) for place in chosen):
            refuse(
                "lora_targets",
                targets,
                f"{one_line(name)} is no linear layer of this model; allowed: {_some(found, moved)}",
            )
    return Targets(chosen, parameters)


def _names(model: Model, targets: str, found: Mapping[Place, LinearCall]) -> tuple[str, ...]:
    if targets == DEFAULT:
        names = TARGETS.get(model.model_type)
        if names is None:
            moved = renamed(model.model_type)
            why = "loses its default" if moved else "has no default"
            some = _some(found, moved)
            refuse(
                "lora_targets",
                targets,
                f"peft {why} for a {model.model_type}; allowed: {ALL_LINEAR}, or names such as {some}",
            )
        return names
    names = tuple(name.strip() for name in targets.replace("+", ",").split(","))
    numbers = [name for name in names if name.rpartition(".")[2].isdigit()]
    if numbers:
        refuse("lora_targets", targets, f"{numbers[0]} is a number in a list of modules; allowed: {_some(found)}")
    for weight in model.program.weights():
        table = weight.name.rpartition(".")[0], None
        is_table = weight.component == "embedding" and looks_tokens_up(weight.shape)
        if is_table and any(_matches(table, name) for name in names):
            refuse("lora_targets", targets, f"an adapter of an embedding {NOT_YET}{_some(found)}")
    return names


def _is_head(place: Place, call: LinearCall) -> bool:
    """Tell whether a layer is what transformers calls the output embeddings."""
    return call.fan_out.name == "vocab" or place[0] in HEADS


def _matches(place: Place, name: str) -> bool:
    path, layer = place
    full = path if layer is None else path.replace("*", str(layer), 1)
    return full == name or full.endswith(f".{name}")


def _name(place: Place) -> str:
    return place[0].rpartition(".")[2]


def _some(found: Mapping[Place, LinearCall], moved: Mapping[str, str] | None = None) -> str:
    """Return the names of the linear layers within the layers; `moved`: those of layers that are parts of a parameter."""
    names = dict.fromkeys([*(_name(place) for place in found if place[1] is not None), *(moved or ())])
    return ", ".join(list(names)[:12])
