"""Models with adapters, quantised bases or frozen parts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from memcalc.inputs.model import Model
from memcalc.inputs.options import NOT_YET, refuse
from memcalc.quantized.program import quantized
from memcalc.quantized.targets import quantized_places
from memcalc.tuning.adapted import with_adapters
from memcalc.tuning.dora import DoraAdapters
from memcalc.tuning.lora import LoraAdapters
from memcalc.tuning.parts import ALLOWED, frozen_by
from memcalc.tuning.saved import saved_by, without_saved
from memcalc.tuning.targets import Targets, adapted_by

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.families.base.linear_modules import Place
    from memcalc.families.base.module import LinearCall
    from memcalc.families.base.program import Program
    from memcalc.tuning.chosen import Tuning


def build_tuned(model: Model, tuning: Tuning) -> Model:
    """Return the model that trains as chosen. Raises InputError for a part or a layer that the model does not have, and if
    nothing is left to train."""
    if tuning.megatron:
        from memcalc.tuning.on_megatron import on_megatron  # the only engine that runs GPTModel

        return on_megatron(model, tuning)
    program = _adapted(model, tuning) if tuning.lora is not None else _frozen(model.program, tuning.freeze or "")
    own = Model(model.name, model.model_type, program, model.fields, model.notes)
    own.tuning, own.whole = tuning, model
    if not own.trainable_parameters:
        refuse("freeze", tuning.freeze, f"leaves nothing to train; allowed: fewer of {ALLOWED}")
    return own


def _adapted(model: Model, tuning: Tuning) -> Program:
    lora, program = tuning.lora, model.program
    assert lora is not None
    if program.source:
        refuse("lora_rank", lora.rank, f"for a {model.model_type}, which is traced, {NOT_YET}0")
    kind = DoraAdapters if lora.dora else LoraAdapters
    targets = adapted_by(model, lora.targets, lora.rank)
    if tuning.quantization is not None and targets.parameters:
        targets = _as_quantized(targets, quantized_places(program, model.model_type))
    calls, parameters = without_saved(targets.calls, lora.saved), targets.parameters
    if not calls and not parameters:
        refuse("modules_to_save", lora.saved, "leaves no linear layer to have an adapter; allowed: fewer modules")
    adapters = kind(lora, calls, saved_by(model, lora.saved, calls), parameters)
    for name, value, off in (("lora_dropout", lora.dropout, 0), ("dora", lora.dora, "off")):
        if parameters and value:
            what = (
                f"peft's adapters of {'fused experts' if adapters.of_experts else 'a router'} (ParamWrapper) have none"
            )
            refuse(name, value, f"{what}; allowed: {off}, or --lora-targets of attention")
    if tuning.quantization is not None:
        program = quantized(program, model.model_type, tuning.quantization)
    return with_adapters(program, adapters)


def _as_quantized(targets: Targets, places: Mapping[Place, LinearCall]) -> Targets:
    """Return the targets over a quantised base: a router that is a linear layer, whose weight is named as a parameter, gets the
    adapter of a quantised layer (peft/tuners/lora/model.py, _create_new_module asks bitsandbytes first)."""
    calls = {place: places[place] for place in targets.parameters if place in places}
    parameters = {place: own for place, own in targets.parameters.items() if place not in calls}
    return Targets({**targets.calls, **calls}, parameters)


def _frozen(program: Program, text: str) -> Program:
    """Return a copy of the program in which the parts that `text` names require no gradient."""
    frozen_names: dict[int | None, set[str]] = {}
    places = frozen_by(text, program)
    for i, weight in enumerate(program.weights()):
        if i in places:
            frozen_names.setdefault(weight.layer, set()).add(weight.name)
    own: Any = copy.copy(program)
    own.__dict__.pop("idle", None)  # the cached count of the whole program
    own.held = {layer: frozenset(names) for layer, names in frozen_names.items()}
    return own
