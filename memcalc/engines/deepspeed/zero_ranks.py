"""The ranks among which DeepSpeed reduces parameters: all parameters among all ranks, except experts that ranks
share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.engines.deepspeed.zero_layout import ALL_REDUCE_BUCKET, groups_of, sizes_of
from memcalc.layout.layer_kinds import LaterShares, elements_of, shares_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memcalc.families.base.module import Weight
    from memcalc.inputs.model import Model


class AmongRanks(NamedTuple):
    """Parameters that are reduced among the same ranks."""

    name: str
    of: str
    """The suffix that names these parameters after a noun, such as " of the experts"."""
    ranks: int
    sizes: tuple[int, ...]
    has: Callable[[Weight], bool]

    def shares(self, model: Model, sent: Callable[[Weight], int]) -> LaterShares:
        """Return the layers' shares of these parameters. `sent` returns the elements that are sent for one of the
        model's weights."""

        def own(weight: Weight) -> int:
            return sent(weight) if self.has(weight) else 0

        return LaterShares(lambda: shares_of(model.program.weights(), sent=own))

    def of_optimizer(self, model: Model) -> LaterShares:
        """Return the layers' shares of the parameters that require a gradient."""
        wants = model.program.wants_gradient
        return self.shares(model, lambda weight: elements_of(weight) if wants(weight) else 0)

    def with_gradients(self, model: Model) -> LaterShares:
        """Return the layers' shares of the parameters that backward makes gradients for."""
        gets = model.program.gets_gradient
        return self.shares(model, lambda weight: elements_of(weight) if gets(weight) else 0)


def _is_any(_: Weight) -> bool:
    return True


def _is_dense(weight: Weight) -> bool:
    return weight.component != "experts"


def _is_expert(weight: Weight) -> bool:
    return weight.component == "experts"


def kinds_of(model: Model, ranks: int) -> list[AmongRanks]:
    """Return all parameters of the optimizer; with expert parallelism the experts apart."""
    groups, sizes = groups_of(model, ranks), sizes_of(model)
    if len(groups) == 1:
        return [AmongRanks("parameters", "", ranks, tuple(sizes[i] for i in groups[0].places), _is_any)]
    dense = tuple(sizes[i] for i in groups[0].places)
    experts = tuple(sizes[i] for group in groups[1:] for i in group.places)
    return [
        AmongRanks("parameters without experts", "", ranks, dense, _is_dense),
        AmongRanks("experts/ep", " of the experts", groups[1].ranks, experts, _is_expert),
    ]


def joined_after_exceeding(sizes: Iterable[int]) -> list[int]:
    """Return the elements that buffered_allreduce_fallback joins, call by call. A call closes once it exceeds the
    bucket."""
    out: list[int] = []
    current = 0
    for size in sizes:
        current += size
        if current > ALL_REDUCE_BUCKET:
            out.append(current)
            current = 0
    return [*out, current] if current else out
