"""Programs with adapters: the weights of the base, under peft's names, with those of the adapters between them."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

from memcalc.families.base.module import BASE
from memcalc.families.base.program import Program

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from memcalc.families.base.module import Weight
    from memcalc.tuning.lora import LoraAdapters, Place


class _Adapted(Program):
    """The base of the classes that `_adapted_class` makes: what adapters change of a program."""

    adapters: LoraAdapters  # pyright: ignore[reportIncompatibleVariableOverride]

    def weights(self) -> Iterator[Weight]:
        """Yield the base's weights, each adapter's behind those of its layer; an adapter of a layer whose weight is another
        module's comes last."""
        base = list(super().weights())
        left, adapters = Counter(map(_place, base)), self.adapters
        for weight in base:
            place = _place(weight)
            if place not in adapters.calls:
                yield weight
                continue
            yield weight._replace(name=f"{place[0]}.{BASE}.{weight.name.rpartition('.')[2]}")
            left[place] -= 1
            if not left[place]:
                yield from adapters.weights(place)
        for place in adapters.calls:
            if place not in left and (place[1] is None or place[1] < self.layers):
                yield from adapters.weights(place)

    def wants_gradient(self, weight: Weight) -> bool:
        return self.adapters.trains(weight)

    @property
    def has_frozen(self) -> bool:
        return True

    def adapted(self, i: int) -> Hashable:
        return frozenset(path for path, layer in self.adapters.calls if layer == i)


def _place(weight: Weight) -> Place:
    return weight.name.rpartition(".")[0], weight.layer


@cache
def _adapted_class(of: type[Program]) -> type[Program]:
    return type(f"Adapted{of.__name__}", (_Adapted, of), {})


def with_adapters(program: Program, adapters: LoraAdapters) -> Program:
    """Return a copy of the program whose linear layers have these adapters."""
    own: Any = copy.copy(program)
    own.__dict__.pop("idle", None)  # the cached count of the base
    own.__class__ = _adapted_class(type(program))
    own.adapters = adapters
    return own
