"""The linear layers that `--lora-targets` names, as peft matches them (peft/tuners/tuners_utils.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.errors import one_line
from memcalc.families.base.linear_modules import linear_modules
from memcalc.families.base.module import looks_tokens_up
from memcalc.inputs.options import NOT_YET, refuse
from memcalc.tuning.default_targets import FUSED, NOT_ALL, TARGETS, WITHOUT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.families.base.linear_modules import Place
    from memcalc.families.base.module import LinearCall
    from memcalc.inputs.model import Model

ALL_LINEAR: Final = "all-linear"
DEFAULT: Final = "default"
_OF_EXPERTS: Final = ("gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")
"""The names of targets that peft moves to the fused parameters of experts."""


def adapted_by(model: Model, targets: str, rank: int) -> Mapping[Place, LinearCall]:
    """Return the linear layers that get an adapter. Raises InputError if there are none, or for modules of other kinds."""
    without = WITHOUT.get(model.model_type, ())
    found = {place: call for place, call in linear_modules(model.program).items() if _name(place) not in without}
    if model.program.layers_share or not any(layer is not None for _, layer in found):
        refuse("lora_rank", rank, f"for the linear layers of a {model.model_type} {NOT_YET}0")
    if targets == ALL_LINEAR and model.model_type in NOT_ALL:
        why = f"for a {model.model_type}, not all of whose linear layers can have an adapter,"
        refuse("lora_targets", targets, f"{why} {NOT_YET}names such as {_some(found)}")
    if targets == ALL_LINEAR:
        if model.model_type in FUSED:
            experts = f"for a {model.model_type}, whose experts are fused parameters,"
            refuse("lora_targets", targets, f"{experts} {NOT_YET}names of other linear layers, such as {_some(found)}")
        return {place: call for place, call in found.items() if call.fan_out.name != "vocab"}
    names = _names(model, targets, found)
    chosen = {place: call for place, call in found.items() if any(_matches(place, name) for name in names)}
    for name in names:
        if not any(_matches(place, name) for place in chosen):
            refuse(
                "lora_targets", targets, f"{one_line(name)} is no linear layer of this model; allowed: {_some(found)}"
            )
    return chosen


def _names(model: Model, targets: str, found: Mapping[Place, LinearCall]) -> tuple[str, ...]:
    if targets == DEFAULT:
        names = TARGETS.get(model.model_type)
        if names is None:
            why = f"peft has no default for a {model.model_type}"
            refuse("lora_targets", targets, f"{why}; allowed: {ALL_LINEAR}, or names such as {_some(found)}")
        return names
    names = tuple(name.strip() for name in targets.replace("+", ",").split(","))
    moved = [name for name in names if name.rpartition(".")[2] in _OF_EXPERTS]
    if moved and model.model_type in FUSED:
        why = f"{moved[0]} is among the experts of a {model.model_type}, which are fused parameters, and"
        refuse("lora_targets", targets, f"{why} {NOT_YET}names of other linear layers")
    numbers = [name for name in names if name.rpartition(".")[2].isdigit()]
    if numbers:
        refuse("lora_targets", targets, f"{numbers[0]} is a number in a list of modules; allowed: {_some(found)}")
    for weight in model.program.weights():
        table = weight.name.rpartition(".")[0], None
        is_table = weight.component == "embedding" and looks_tokens_up(weight.shape)
        if is_table and any(_matches(table, name) for name in names):
            refuse("lora_targets", targets, f"an adapter of an embedding {NOT_YET}{_some(found)}")
    return names


def _matches(place: Place, name: str) -> bool:
    path, layer = place
    full = path if layer is None else path.replace("*", str(layer), 1)
    return full == name or full.endswith(f".{name}")


def _name(place: Place) -> str:
    return place[0].rpartition(".")[2]


def _some(found: Mapping[Place, LinearCall]) -> str:
    """Return the names of the linear layers within the layers."""
    names = dict.fromkeys(_name(place) for place in found if place[1] is not None)
    return ", ".join(list(names)[:12])
