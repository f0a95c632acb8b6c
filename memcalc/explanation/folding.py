"""Similar rows as one step, with common dims factored out: `layers·(4·batch·seq·ffn + …)·2 B`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core import dtypes
from memcalc.core.rows import copied
from memcalc.explanation.step import Step, Unit

if TYPE_CHECKING:
    from memcalc.core.rows import Item

Sizes = tuple[tuple[str, int], ...]
ITEMSIZES: Final = {each.name: each.itemsize for each in vars(dtypes).values() if isinstance(each, dtypes.DType)}
"""Bytes of an element, by the name of its dtype."""
_MOST_TERMS: Final = 8
"""The most terms of a sum that are shown. A longer sum shows its largest terms, and one number for the others."""

_MOST_STEPS: Final = 10


class Term(NamedTuple):
    """A row as a product of named dims with a unit: bytes of an element, or FLOP."""

    sizes: Sizes
    unit: str
    each: int
    """The unit as a number."""
    value: int


class Sum(NamedTuple):
    """A formula in named dims, and the same formula in numbers."""

    formula: str
    numbers: str


def term_of(item: Item, value: int, layers: int | None) -> Term:
    """Return a number of a row's bytes as copies of its block: the bytes in a step, or those at the peak."""
    itemsize = ITEMSIZES.get(item.dtype, 1)
    block = item.shape
    while block and block[0][0] in ("layers", "copies"):
        block = block[1:]
    each = itemsize * prod(size for _, size in block)
    copies = value // each if each else 1
    if not each or copies * each != value or not copies:
        return Term((("bytes", value),), "1 B", 1, value)
    return Term(copied(block, item.name, copies, layers), f"{itemsize} B", itemsize, value)


def summed(terms: Sequence[Term]) -> Sum:
    """Return terms of one unit as one sum: equal terms are counted, and a common beginning is factored out."""
    counts = Counter(term.sizes for term in terms)
    ordered = sorted(counts, key=lambda sizes: -counts[sizes] * prod(size for _, size in sizes))
    shown, others = ordered[:_MOST_TERMS], ordered[_MOST_TERMS:]
    if len(others) == 1:
        shown, others = ordered, []
    by_layers: dict[Sizes, list[tuple[Sizes, int]]] = {}
    for sizes in shown:
        front = sizes[:1] if sizes and sizes[0][0] == "layers" else ()
        by_layers.setdefault(front, []).append((sizes[len(front) :], counts[sizes]))
    parts = [_factored(front, inner) for front, inner in by_layers.items()]
    if others:
        rest = sum(counts[sizes] * prod(size for _, size in sizes) for sizes in others)
        parts.append(Sum("…", str(rest)))
    several = len(parts) > 1
    formula, numbers = (" + ".join(words) for words in zip(*parts, strict=True))
    unit = terms[0].unit
    return Sum(_times(formula, unit, several), _times(numbers, unit, several))


def _factored(front: Sizes, inner: list[tuple[Sizes, int]]) -> Sum:
    """Return the common dims, times the sum of the rest in brackets."""
    formulas: list[str] = []
    numbers: list[str] = []
    for sizes, count in inner:
        times = [str(count)] if count > 1 else []
        formulas.append("·".join([*times, *(name for name, _ in sizes)]) or "1")
        numbers.append("·".join([*times, *(str(size) for _, size in sizes)]) or "1")
    sums = [" + ".join(words) for words in (formulas, numbers)]
    if not front:
        return Sum(*sums)
    if len(inner) > 1:
        sums = [f"({words})" for words in sums]
    return Sum(f"{front[0][0]}·{sums[0]}", f"{front[0][1]}·{sums[1]}")


def _times(words: str, unit: str, several: bool) -> str:
    if words == "1":
        return unit
    bare = several or (" + " in words and not words.endswith(")"))
    return f"({words})·{unit}" if bare else f"{words}·{unit}"


class Group(NamedTuple):
    """The rows of one step: its name, its reason, and the rows' terms and sources."""

    what: str
    why: str
    terms: tuple[Term, ...]
    sources: tuple[str, ...]

    @property
    def value(self) -> int:
        return sum(term.value for term in self.terms)


def steps_of(groups: Iterable[Group], unit: Unit, rest: Callable[[int], str], least: float = 0.002) -> tuple[Step, ...]:
    """Return a step for each group, the largest first. Groups below `least` of the sum, and those after the tenth, are one
    step, which `rest` names by the number of its rows."""
    ordered = sorted(groups, key=lambda group: -group.value)
    whole = sum(group.value for group in ordered)
    shown = sum(group.value >= least * whole for group in ordered)
    shown = len(ordered) if len(ordered) - shown < 2 else shown
    shown = min(shown, _MOST_STEPS) if len(ordered) > _MOST_STEPS + 1 else shown
    steps, small = [_step(group, unit) for group in ordered[:shown]], ordered[shown:]
    if small:
        numbers = " + ".join(str(group.value) for group in small) if len(small) <= _MOST_TERMS else ""
        rows = sum(len(group.terms) for group in small)
        sources = sources_of(source for group in small for source in group.sources)
        steps.append(Step(rest(rows), "", numbers, sum(group.value for group in small), unit, "", sources))
    return tuple(steps)


def _step(group: Group, unit: Unit) -> Step:
    words = summed(group.terms)
    return Step(group.what, words.formula, words.numbers, group.value, unit, group.why, sources_of(group.sources))


def sources_of(sources: Iterable[str]) -> str:
    """Return the sources of several rows, each once, at most three."""
    named = [source for source in dict.fromkeys(sources) if source]
    return "; ".join([*named[:3], *(["…"] if len(named) > 3 else [])])
