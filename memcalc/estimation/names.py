"""Unique names for the rows of a component.

Rows can share a name: an op allocates several tensors, or a weight exists whole and in parts. Brackets after the name then
tell the rows apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from memcalc.core.rows import Item


def with_names_of_their_own(items: Sequence[Item]) -> list[Item]:
    """Return the items in their order. Items that share a component and a name get a distinguishing word in brackets."""
    alike: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        alike[item.component, item.name].append(number)
    out = list(items)
    for numbers in alike.values():
        if len(numbers) > 1:
            words = _least_that_distinguish([items[number] for number in numbers])
            for number, word in zip(numbers, words, strict=True):
                out[number] = items[number]._replace(name=f"{items[number].name} ({word})")
    return out


def _least_that_distinguish(items: Sequence[Item]) -> list[str]:
    for describe in _DESCRIPTIONS:
        words = [describe(item) for item in items]
        if all(words) and len(set(words)) == len(words):
            return words
    return [str(number) for number, _ in enumerate(items, start=1)]


def _own_dims(item: Item) -> list[tuple[str, int]]:
    """Return the item's dims without "layers" and "copies", which only count tensors."""
    return [(name, size) for name, size in item.shape if name not in ("layers", "copies")]


def _dims(item: Item) -> str:
    return "·".join(name for name, _ in _own_dims(item))


def _sizes(item: Item) -> str:
    return ", ".join(f"{name} {size}" for name, size in _own_dims(item))


_DESCRIPTIONS: Final[tuple[Callable[[Item], str], ...]] = (
    lambda item: item.dtype,
    _dims,
    lambda item: ", ".join(word for word in (item.dtype, _dims(item)) if word),
    _sizes,
    lambda item: ", ".join(word for word in (item.dtype, _sizes(item)) if word),
    lambda item: f"{item.dtype}, {item.formula}",
    lambda item: f"{item.formula}, {'one block' if item.blocks == 1 else f'{item.blocks} blocks'}",
)
"""The words that can tell items apart, the shortest first."""
