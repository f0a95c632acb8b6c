"""The stack of a model's layers: the names of its weights, and the pattern in which it repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.families.base.module import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence


def stacked(
    path: str, variants: Sequence[Hashable], layer_weights: Callable[[int], Iterator[Weight]]
) -> Iterator[Weight]:
    """Yield the weights of all layers under `path`, layer by layer. Those of one variant are made once."""
    written: dict[Hashable, list[Weight]] = {}
    for i, variant in enumerate(variants):
        if variant not in written:
            written[variant] = [w._replace(name=f"{path}.*.{w.name}") for w in layer_weights(i)]
        for weight in written[variant]:
            yield Weight(weight.name, weight.shape, weight.component, i)


def pattern_of(variants: Sequence[Hashable]) -> tuple[int, int] | None:
    """Return the shortest (lead, period) of a stack with at least six periods after its lead; None if there is none."""
    return common_pattern([variants])


def common_pattern(stacks: Sequence[Sequence[Hashable]]) -> tuple[int, int] | None:
    """Return the shortest common (lead, period) of several stacks, each with at least six periods after its lead; None
    if there is none."""
    depth = min(map(len, stacks))
    found: list[tuple[int, int, int]] = []
    for period in range(1, depth // 6 + 1):
        breaks = [i for stack in stacks for i in range(len(stack) - period) if stack[i] != stack[i + period]]
        lead = max(breaks) + 1 if breaks else 0
        if lead + 6 * period <= depth:
            found.append((lead + 4 * period, lead, period))
    return min(found)[1:] if found else None
