"""The part of Megatron's GPTModel that trains: frozen parts by the names of its weights, and Megatron-Bridge's adapters."""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import Dim
from memcalc.families import support_of
from memcalc.families.base.architecture import architecture_of
from memcalc.families.base.program import Program
from memcalc.inputs.model import Model
from memcalc.inputs.options import NOT_YET, refuse
from memcalc.megatron.gpt_model import GPTModel
from memcalc.megatron.layout import Layout
from memcalc.megatron.trained import TARGETS, Adapters, Trained
from memcalc.megatron.trained_model import TrainedGPTModel
from memcalc.tuning.parts import allowed_of, frozen_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.families.base.architecture import Architecture
    from memcalc.families.base.module import Weight
    from memcalc.tuning.chosen import Lora, Tuning

_OF_CANONICAL: Final = ("linear_q", "linear_k", "linear_v", "linear_fc1_up", "linear_fc1_gate")
"""The targets of Megatron-Bridge's CanonicalLoRA, which has an adapter for each part of a joined layer."""


class _OnMegatron(Program):
    """The base of the classes that `_class_of` makes: a program whose weights are GPTModel's."""

    gpt: GPTModel
    trained: Trained

    def weights(self) -> Iterator[Weight]:
        return self.gpt.weights()

    def wants_gradient(self, weight: Weight) -> bool:
        return self.gpt.wants_gradient(weight)

    @property
    def has_frozen(self) -> bool:
        return True


@cache
def _class_of(of: type[Program]) -> type[Program]:
    return type(f"{of.__name__}OnMegatron", (_OnMegatron, of), {})


def on_megatron(model: Model, tuning: Tuning) -> Model:
    """Return the model whose GPTModel trains as chosen. Raises InputError for a part or a layer that it does not have, and if
    nothing is left to train. A model that has no GPTModel is returned as it is: the checks of the engine refuse it."""
    if support_of(model.model_type).architecture is None:
        return model
    a = architecture_of(model.model_type, model.program.config)
    name, value = ("lora_rank", tuning.lora.rank) if tuning.lora is not None else ("freeze", tuning.freeze)
    if a.mtp:
        refuse(name, value, f"with multi-token prediction {NOT_YET}without --mtp-num-layers")
    if a.latent is not None:
        why = f"with engine megatron for the latent attention of a {model.model_type}"
        refuse(name, value, f"{why} {NOT_YET}leave it out")
    whole = _whole(a, Layout(layers=a.layers, routed=a.routed(0, a.layers)))
    trained = _frozen(whole, tuning.freeze or "") if tuning.lora is None else _adapted(model, a, whole, tuning.lora)
    own: Any = copy.copy(model.program)
    own.__dict__.pop("idle", None)  # the cached count of the base
    own.__class__ = _class_of(type(model.program))
    own.trained = trained
    own.gpt = _whole(a, whole.layout._replace(trained=trained))
    made = Model(model.name, model.model_type, own, model.fields, model.notes)
    made.tuning, made.whole = tuning, model
    if not made.trainable_parameters:
        allowed = allowed_of(list(whole.weights()))
        refuse("freeze", tuning.freeze, f"leaves nothing to train; allowed: fewer of {allowed}")
    return made


def _whole(a: Architecture, layout: Layout) -> GPTModel:
    """Return the whole model on one rank, without the padding of the vocabulary."""
    gpt = GPTModel(a, layout) if layout.trained is None else TrainedGPTModel(a, layout)
    gpt.vocab = Dim("vocab", a.vocab)
    return gpt


def _frozen(gpt: GPTModel, text: str) -> Trained:
    """Return what is left of a model to train without the parts that `text` names."""
    places = frozen_by(text, gpt)
    weights = list(gpt.weights())
    experts = any(w.component == "experts" and i not in places for i, w in enumerate(weights))
    frozen = [weight for i, weight in enumerate(weights) if i in places]
    return _without(gpt, frozen, None, experts=experts)


def _without(gpt: GPTModel, frozen: list[Weight], adapters: Adapters | None, *, experts: bool) -> Trained:
    names: dict[int | None, set[str]] = {}
    for weight in frozen:
        names.setdefault(weight.layer, set()).add(weight.name)
    of_layers = tuple(frozenset(names.get(i, ())) for i in range(gpt.layers))
    return Trained(of_layers, frozenset(names.get(None, ())), adapters, experts)


def _adapted(model: Model, a: Architecture, gpt: GPTModel, lora: Lora) -> Trained:
    """Return the adapters of a model, all of whose own weights are frozen."""
    targets = _targets(lora.targets)
    mlp = [name for name in TARGETS if name in targets and "_fc" in name]
    if a.experts is not None and mlp:
        why = f"the experts of a {model.model_type} have such layers, whose adapters with engine megatron"
        refuse("lora_targets", lora.targets, f"{mlp[0]}: {why} {NOT_YET}linear_qkv, linear_proj")
    return _without(gpt, list(gpt.weights()), Adapters(lora.rank, targets, lora.dropout), experts=False)


def _targets(text: str) -> frozenset[str]:
    if text == "default":
        return frozenset(TARGETS)
    names = [name.strip() for name in text.replace("+", ",").split(",")]
    allowed = f"default, or of {', '.join(TARGETS)}"
    for name in names:
        if name in _OF_CANONICAL:
            why = f"{name} is a target of Megatron-Bridge's CanonicalLoRA, which with engine megatron"
            refuse("lora_targets", text, f"{why} {NOT_YET}{allowed}")
        if name not in TARGETS:
            why = f"{name or 'an empty name'} is no layer of GPTModel that Megatron-Bridge's LoRA adapts"
            refuse(
                "lora_targets", text, f"{why} (core/models/gpt: joined q, k, v; joined gate and up); allowed: {allowed}"
            )
    return frozenset(names)
