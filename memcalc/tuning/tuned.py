"""A model of which a part trains, made from the whole model and the options that say what trains."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from memcalc.inputs.model import Model
from memcalc.inputs.options import NOT_YET, refuse
from memcalc.quantized.chosen import Quantization, quantization_of
from memcalc.quantized.four_bit import FourBit
from memcalc.quantized.program import with_quantized_weights
from memcalc.quantized.targets import quantized_places
from memcalc.tuning.adapted import with_adapters
from memcalc.tuning.dora import DoraAdapters
from memcalc.tuning.lora import Lora, LoraAdapters
from memcalc.tuning.parts import ALLOWED, frozen_by
from memcalc.tuning.saved import saved_by, without_saved
from memcalc.tuning.targets import adapted_by

if TYPE_CHECKING:
    from memcalc.families.base.program import Program


class Chosen(Protocol):
    """Options or a setup: both say what trains."""

    @property
    def precision(self) -> str: ...
    @property
    def base_dtype(self) -> str | None: ...
    @property
    def quantize(self) -> str: ...
    @property
    def double_quant(self) -> bool: ...
    @property
    def quantize_compute_dtype(self) -> str | None: ...
    @property
    def prepare_kbit_training(self) -> bool: ...
    @property
    def freeze(self) -> str | None: ...
    @property
    def lora_rank(self) -> int: ...
    @property
    def lora_targets(self) -> str | None: ...
    @property
    def lora_dropout(self) -> float | None: ...
    @property
    def lora_bias(self) -> str | None: ...
    @property
    def adapter_dtype(self) -> str | None: ...
    @property
    def dora(self) -> bool: ...
    @property
    def modules_to_save(self) -> str | None: ...


class Tuning(NamedTuple):
    """The options that say which weights train."""

    freeze: str | None
    lora: Lora | None
    quantization: Quantization | None = None


def tuning_of(chosen: Chosen) -> Tuning:
    """Return what trains by options or by a setup, defaults filled in."""
    if not chosen.lora_rank:
        return Tuning(chosen.freeze, None)
    how = chosen.lora_targets or "default", chosen.lora_dropout or 0.0, chosen.lora_bias or "none"
    kind = chosen.adapter_dtype or "fp32", chosen.modules_to_save, chosen.dora
    return Tuning(chosen.freeze, Lora(chosen.lora_rank, *how, *kind), quantization_of(chosen))


def tuned(model: Model, chosen: Chosen) -> Model:
    """Return the model of which the chosen part trains: the model itself if all of it does, or if it was made for the same
    choice. It is made once. Raises InputError for a part that the model does not have."""
    tuning, whole = tuning_of(chosen), model.whole
    if tuning == Tuning(None, None):
        return whole
    if model.tuning == tuning:
        return model
    key = "tuned", tuning
    if key not in whole.profiles:
        whole.profiles[key] = _made(whole, tuning)
    return whole.profiles[key]


def _made(model: Model, tuning: Tuning) -> Model:
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
    calls = without_saved(adapted_by(model, lora.targets, lora.rank), lora.saved)
    if not calls:
        refuse("modules_to_save", lora.saved, "leaves no linear layer to have an adapter; allowed: fewer modules")
    adapters = kind(lora, calls, saved_by(model, lora.saved, calls))
    if tuning.quantization is not None:
        packing = FourBit(*tuning.quantization)
        program = with_quantized_weights(program, packing, quantized_places(program, model.model_type))
    return with_adapters(program, adapters)


def _frozen(program: Program, text: str) -> Program:
    """Return a copy of the program in which the parts that `text` names want no gradient."""
    held: dict[int | None, set[str]] = {}
    places = frozen_by(text, program)
    for i, weight in enumerate(program.weights()):
        if i in places:
            held.setdefault(weight.layer, set()).add(weight.name)
    own: Any = copy.copy(program)
    own.__dict__.pop("idle", None)  # the cached count of the whole program
    own.held = {layer: frozenset(names) for layer, names in held.items()}
    return own
