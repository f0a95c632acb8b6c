"""The modules that `--modules-to-save` names, as peft finds them (peft/utils/other.py, _set_trainable).

peft leaves the module where it is, frozen, and trains a copy of it that takes its place (ModulesToSaveWrapper). The copy has
weights of its own, also where the module's weight was another module's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.families.base.linear_modules import linear_modules
from memcalc.inputs.options import NOT_YET, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memcalc.families.base.linear_modules import Place
    from memcalc.families.base.module import LinearCall, Weight
    from memcalc.families.base.program import Program
    from memcalc.inputs.model import Model

_OPTION: Final = "modules_to_save"


def listed(text: str) -> tuple[str, ...]:
    """Return the names of a list with commas or plus signs."""
    return tuple(name.strip() for name in text.replace("+", ",").split(","))


def saved_by(model: Model, text: str | None, calls: Mapping[Place, LinearCall]) -> frozenset[Place]:
    """Return the modules that train as copies of themselves. Raises InputError for names that no module has, and for modules
    that are not modelled. `calls` are the adapted linear layers."""
    if text is None:
        return frozenset()
    program = model.program
    if not _reaches_tables(program):
        refuse(_OPTION, text, f"for a {model.model_type} {NOT_YET}leave it out")
    places = dict.fromkeys([*map(place_of, program.weights()), *_tied_head(program)])
    around = {outer for place in places for outer in _outer(full_name(place))}
    single = _single(model)
    found: set[Place] = set()
    for name in listed(text):
        if not any(is_named(full_name(place), name) for place in places):
            several = any(is_named(path, name) for path in around)
            why = f"a module of several modules, {NOT_YET}" if several else "is no module of this model; allowed: "
            refuse(_OPTION, text, f"{name or 'an empty name'}{', ' if several else ' '}{why}{_some(single)}")
        own = [place for place in places if full_name(place).endswith(name)]
        for place in own:
            if place not in single or full_name(place) in around or place in calls:
                refuse(_OPTION, text, f"{name} means {full_name(place)} too, which {NOT_YET}{_some(single)}")
        for path in around:
            if path.endswith(name):
                refuse(_OPTION, text, f"{name} means {path} too, which {NOT_YET}{_some(single)}")
        found.update(own)
    return frozenset(found)


def _reaches_tables(program: Program) -> bool:
    """Tell whether the program looks tokens up in one table, and computes its logits with it or with a head of its own."""
    names = {weight.name for weight in program.weights()}
    head = {f"{program.unembedding}.weight", f"{program.unembedding}.bias"} & names
    is_tied = program.head_name == program.embedding
    return not program.layers_share and f"{program.embedding}.weight" in names and not (is_tied and head)


def _single(model: Model) -> dict[Place, None]:
    """Return the modules that can train as copies: the table of tokens, the head, norms, and linear layers."""
    program = model.program
    norms = [place_of(weight) for weight in program.weights() if weight.component == "norm"]
    untrained = {name.rpartition(".")[0] for name in program.untrained}
    found = dict.fromkeys([(program.embedding, None), (program.unembedding, None), *norms, *linear_modules(program)])
    return {place: None for place in found if place[0] not in untrained}


def without_saved(calls: Mapping[Place, LinearCall], text: str | None) -> dict[Place, LinearCall]:
    """Return the linear layers that can have an adapter: those that no name of a module to save means
    (peft/tuners/tuners_utils.py, check_target_module_exists)."""
    names = () if text is None else listed(text)
    return {place: call for place, call in calls.items() if not any(is_named(full_name(place), name) for name in names)}


def is_named(path: str, name: str) -> bool:
    """Tell whether a name is a whole path of a module, or its last parts."""
    return f".{path}".endswith(f".{name}")


def full_name(place: Place) -> str:
    """Return a module's path with the number of its layer."""
    path, layer = place
    return path if layer is None else path.replace("*", str(layer), 1)


def place_of(weight: Weight) -> Place:
    """Return the module that has a weight."""
    return weight.name.rpartition(".")[0], weight.layer


def _tied_head(program: Program) -> list[Place]:
    return [(program.unembedding, None)] if program.head_name == program.embedding else []


def _outer(path: str) -> Iterator[str]:
    """Yield the modules around a module."""
    while path := path.rpartition(".")[0]:
        yield path


def _some(places: Mapping[Place, None]) -> str:
    """Return the names of modules, those outside the layers first."""
    names = dict.fromkeys(place[0].rpartition(".")[2] for place in sorted(places, key=lambda one: one[1] is not None))
    return ", ".join(list(names)[:12])
