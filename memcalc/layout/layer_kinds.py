"""Layers of a rank by their weights: layers with experts beside dense ones, a decoder's beside an encoder's."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.dims import formula, numel

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from memcalc.families.base.module import Weight


class LayerKind(NamedTuple):
    """`layers` layers with the same weights."""

    layers: int
    elements: int
    """The elements of one layer as they are sent: an engine may pad them."""
    formula: str
    """The weights of one layer in named dims."""


class Shares(NamedTuple):
    """The layers' shares of a collective over parameters or gradients."""

    kinds: tuple[LayerKind, ...]
    whole: int
    """The elements that are sent in total, including those outside the layers."""

    @property
    def of_layers(self) -> int:
        """Return the elements of all layers."""
        return sum(kind.layers * kind.elements for kind in self.kinds)


class LaterShares:
    """Shares that are found when they are first asked for: few answers show them."""

    def __init__(self, find: Callable[[], Shares]) -> None:
        self._find = find

    @cached_property
    def _found(self) -> Shares:
        return self._find()

    def of(self, whole: int) -> LaterShares:
        """Return the same layers' shares of another number of elements."""
        return LaterShares(lambda: self._found._replace(whole=whole))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return self._found.kinds

    @property
    def whole(self) -> int:
        return self._found.whole

    @property
    def of_layers(self) -> int:
        return self._found.of_layers

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Shares, LaterShares)):
            return NotImplemented
        return (self.kinds, self.whole) == (other.kinds, other.whole)

    def __hash__(self) -> int:
        return hash(self._found)


def elements_of(weight: Weight) -> int:
    return numel(weight.shape)[0]


def shares_of(*stacks: Iterable[Weight], sent: Callable[[Weight], int] = elements_of) -> Shares:
    """Return the shares of the weights of one program, or of each chunk of a pipeline rank. `sent` returns the elements
    that the engine moves for a weight."""
    counts: Counter[tuple[int, str]] = Counter()
    whole = 0
    for stack in stacks:
        layers: dict[tuple[str, int], list[Weight]] = {}
        for weight in stack:
            if weight.layer is None:
                whole += sent(weight)
            else:
                layers.setdefault((weight.name.split("*")[0], weight.layer), []).append(weight)
        keys = [_key(layer, sent) for layer in layers.values()]
        alike, first = Counter(keys), dict(zip(keys, layers.values(), strict=True))
        for key, n in alike.items():
            elements = sum(map(sent, first[key]))
            whole += n * elements
            counts[elements, in_named_dims(first[key], sent)] += n
    return Shares(tuple(LayerKind(n, *kind) for kind, n in counts.items() if kind[0]), whole)


def _key(layer: Sequence[Weight], sent: Callable[[Weight], int]) -> Hashable:
    return tuple((weight.name, sent(weight), *(dim.size for dim in weight.shape)) for weight in layer)


def in_named_dims(weights: Sequence[Weight], sent: Callable[[Weight], int] = elements_of) -> str:
    """Return the weights' elements in named dims, the largest first: "3·ffn·hidden + 2·hidden". Products of the same
    dims are one term."""
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
    """`times` products of the same dims, with their elements."""

    elements: int
    times: int
    dims: str
