"""Layers of a rank by their weights: those with experts beside dense ones, a decoder's beside an encoder's."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.dims import formula, numel

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from memcalc.families.base.module import Weight


class LayerKind(NamedTuple):
    """`layers` layers whose weights are alike."""

    layers: int
    elements: int
    """Of one layer, as many as are sent: an engine may pad them."""
    formula: str
    """Their weights in named dims."""


class Shares(NamedTuple):
    """This is what of a collective over parameters or gradients is the layers'."""

    kinds: tuple[LayerKind, ...]
    whole: int
    """Elements of all that is sent, those outside the layers included."""

    @property
    def of_layers(self) -> int:
        """Elements of all layers."""
        return sum(kind.layers * kind.elements for kind in self.kinds)


def elements_of(weight: Weight) -> int:
    return numel(weight.shape)[0]


def shares_of(*stacks: Iterable[Weight], sent: Callable[[Weight], int] = elements_of) -> Shares:
    """Of the weights of one program, or of each chunk of a pipeline rank. `sent`: elements that the engine moves for one."""
    counts: Counter[tuple[int, str]] = Counter()
    whole = 0
    for stack in stacks:
        layers: dict[tuple[str, int], list[Weight]] = {}
        for weight in stack:
            if weight.layer is None:
                whole += sent(weight)
            else:
                layers.setdefault((weight.name.split("*")[0], weight.layer), []).append(weight)
        alike = Counter(map(_key, layers.values()))
        first = {_key(layer): layer for layer in layers.values()}
        for key, n in alike.items():
            elements = sum(map(sent, first[key]))
            whole += n * elements
            counts[elements, in_named_dims(first[key], sent)] += n
    return Shares(tuple(LayerKind(n, *kind) for kind, n in counts.items() if kind[0]), whole)


def _key(layer: Sequence[Weight]) -> Hashable:
    return tuple((weight.name, *(dim.size for dim in weight.shape)) for weight in layer)


def in_named_dims(weights: Sequence[Weight], sent: Callable[[Weight], int] = elements_of) -> str:
    """ "3·ffn·hidden + 2·hidden", the largest first; products of the same dims are one."""
    terms: dict[tuple[str, ...], _Term] = {}
    for weight in weights:
        if sent(weight):
            parts = formula(weight.shape).split("·")
            dims = [part for part in parts if not part.isdigit()]
            term = terms.get(tuple(sorted(dims)), _Term(0, 0, "·".join(dims)))
            times = prod(int(part) for part in parts if part.isdigit())
            terms[tuple(sorted(dims))] = _Term(term.elements + sent(weight), term.times + times, term.dims)
    largest_first = sorted(terms.values(), key=lambda term: -term.elements)
    sums = " + ".join(f"{term.times}·{term.dims}" if term.times > 1 else term.dims for term in largest_first)
    padded = any(sent(weight) not in (0, elements_of(weight)) for weight in weights)
    return f"{sums}, padded to {sum(map(sent, weights))}" if padded else sums


class _Term(NamedTuple):
    """So many products of the same dims."""

    elements: int
    times: int
    dims: str
