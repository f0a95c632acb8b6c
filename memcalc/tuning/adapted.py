"""Programs with adapters: the weights of the base, under peft's names, with those of the adapters between them."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from memcalc.families.base.module import BASE, COPY
from memcalc.families.base.program import Program
from memcalc.tuning.lora import COPIES, ORIGINALS
from memcalc.tuning.saved import place_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from memcalc.families.base.module import Buffer, Weight
    from memcalc.tuning.lora import LoraAdapters


ORIGINAL: Final = "original_module"
"""peft's name of a module that a copy takes the place of."""


class _Adapted(Program):
    """The base of the classes that `_adapted_class` makes: what adapters change of a program."""

    adapters: LoraAdapters  # pyright: ignore[reportIncompatibleVariableOverride]

    def weights(self) -> Iterator[Weight]:
        """Yield the base's weights, each adapter's behind those of its layer; an adapter of a layer whose weight is another
        module's comes last."""
        base = list(super().weights())
        left, adapters = Counter(map(place_of, base)), self.adapters
        copies: list[Weight] = []
        for weight in base:
            place = place_of(weight)
            if place in adapters.saved:
                yield _within(ORIGINAL, weight, ORIGINALS)
                copies.append(_within(COPY, weight, COPIES))
                left[place] -= 1
                if not left[place]:
                    yield from copies
                    copies.clear()
                continue
            if place in adapters.parameters:
                yield _within(".".join([BASE] * len(adapters.parameters[place])), weight, weight.component)
                left[place] -= 1
                if not left[place]:
                    yield from adapters.weights_of_parameters(place)
                continue
            if place not in adapters.calls:
                yield weight
                continue
            yield _within(BASE, weight, weight.component)
            left[place] -= 1
            if not left[place]:
                yield from adapters.weights(place)
        for place in adapters.calls:
            if place not in left and (place[1] is None or place[1] < self.layers):
                yield from adapters.weights(place)
        head = type(self).unembedding, None
        if head in adapters.saved and head not in left:
            (table,) = (weight for weight in base if weight.name == f"{type(self).embedding}.weight")
            yield table._replace(name=f"{self.unembedding}.weight", component=COPIES)

    def buffers(self) -> Iterator[Buffer]:
        """Yield the base's buffers; those of a module that trains as a copy twice."""
        for buffer in super().buffers():
            path, _, name = buffer.name.rpartition(".")
            if not self.adapters.saves(path, buffer.layer):
                yield buffer
                continue
            for copied in (ORIGINAL, COPY):
                yield buffer._replace(name=f"{path}.{copied}.{name}")

    @property
    def head_name(self) -> str:
        """Return the name of the module whose weight computes the logits: that of a head that is not tied any more."""
        return self.unembedding if self.unembedding.endswith(COPY) else super().head_name

    def wants_gradient(self, weight: Weight) -> bool:
        return self.adapters.trains(weight)

    @property
    def has_frozen(self) -> bool:
        return True

    @property
    def external(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        return (*super().external, *self.adapters.external)

    def adapted(self, i: int) -> Hashable:
        places = *self.adapters.calls, *self.adapters.saved, *self.adapters.parameters
        return frozenset(path for path, layer in places if layer == i)


def _within(name: str, weight: Weight, component: str) -> Weight:
    """Return a weight whose module is now called `name` within another one."""
    path, _, own = weight.name.rpartition(".")
    return weight._replace(name=f"{path}.{name}.{own}", component=component)


@cache
def _adapted_class(of: type[Program]) -> type[Program]:
    return type(f"Adapted{of.__name__}", (_Adapted, of), {})


def with_adapters(program: Program, adapters: LoraAdapters) -> Program:
    """Return a copy of the program whose linear layers have these adapters, and whose saved modules are copies."""
    own: Any = copy.copy(program)
    own.__dict__.pop("idle", None)  # the cached count of the base
    own.__class__ = _adapted_class(type(program))
    own.adapters = adapters
    if adapters.saves(program.unembedding, None):
        own.unembedding = f"{program.unembedding}.{COPY}"
    if adapters.saves(program.embedding, None):  # a tied head keeps the original
        own.embedding = f"{program.embedding}.{ORIGINAL}"
    return own
