"""One rank that is estimated: what it holds, and its runs on paper."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import Poly, numel
from memcalc.engines.base.holdings import Holdings
from memcalc.megatron.schedules import State, Turn
from memcalc.setup.setup import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memcalc.core.rows import Row
    from memcalc.engines.base.holdings import Order
    from memcalc.layout.collectives import Collective
    from memcalc.tape.profile import Profile


class Sums(NamedTuple):
    """An engine's rows added up by phase, as polynomials in batch and seq."""

    always: Poly
    forward: Poly
    backward: Poly
    step: Poly
    flush: Poly
    after_backward: tuple[Poly, ...]


class Rank(NamedTuple):
    """One pipeline rank; without pipelining the only one."""

    number: int
    holdings: Holdings
    sums: Sums
    profiles: tuple[Profile, ...]
    """The profile of each model chunk on the rank; empty for a bare number of parameters."""
    states: tuple[State, ...]
    """The possible states in a step: a chunk's forward or backward, and the tensors that other micro-batches have
    saved."""
    layers: int
    """The number of transformer layers that the rank runs."""
    collectives: Callable[[Setup], list[Collective]]
    """Returns the real collectives of one optimizer step. The setup may differ from this rank's in the numbers of its
    polynomials."""
    textbook: Callable[[], list[Collective]]
    """Returns the step's collectives as the papers count them; empty if the engine does just that."""
    turns: tuple[Turn, ...] = ()
    """The forwards and backwards of the rank's chunks in their order; empty if micro-batches run one after the
    other."""
    between: Row | None = None
    """One of the tensors that a state and a turn count as `between` stages."""
    first: Callable[[], Profile] | None = None
    """Returns the profile of the first micro-batch, if later ones differ."""
    untraced: Callable[[], Profile] | None = None
    """Returns the profile of the very first micro-batch of a process, if later ones differ."""
    in_flight: int | None = None
    """The number of a chunk's forwards that are saved at once, if the profile covers all micro-batches and no state
    says so."""
    on_paper: int = 1
    """The number of micro-batches in the run of a profile, all alike."""
    cp: int | None = None
    """The number of the context-parallel rank, if these ranks differ."""
    in_order: Callable[[], Order] | None = None
    """Returns the order of the rank's allocations, if `holdings` does not have it."""

    @property
    def order(self) -> Order | None:
        """Return the order in which the rank allocates what it holds; None if it is not known."""
        return self.holdings.order if self.in_order is None else self.in_order()


WHOLE_STEP: Final = (Turn("forward", 0), Turn("backward", 0))
"""The turns of a profile that covers all micro-batches."""
ONE_STATE: Final = (State("forward", 0, (0,)), State("backward", 0, (0,)))
"""The states of a profile of one micro-batch, or of all."""


def _sum(rows: Iterable[Row]) -> Poly:
    total = [0] * 6
    for row in rows:
        for i, c in enumerate(numel(row.shape)[1]):
            if c:
                total[i] += c * row.copies * row.dtype.itemsize
    return tuple(total)  # type: ignore[return-value]


def sums_of(holdings: Holdings) -> Sums:
    """Return the bytes of the rows by phase."""
    return Sums(
        _sum(holdings.always),
        _sum(holdings.forward),
        _sum(holdings.backward),
        _sum(holdings.step),
        _sum(holdings.flush.rows if holdings.flush else ()),
        tuple(_sum(rows) for rows in holdings.after_backward),
    )


class HoldingsAndSums(NamedTuple):
    """Holdings and their sums."""

    holdings: Holdings
    sums: Sums


_NOT_HELD: Final = frozenset({
    "gpus", "dp", "shard_group", "global_batch_size", "micro_batch_size", "seq_len", "recompute",
    "recompute_layers", "pp_rank", "schedule", "virtual_stages", "first_stage_layers", "last_stage_layers", "stage_layers",
    "recompute_modules", "offload_modules",
    "microbatch_group_size", "gpu", "network_gbps", "gemm_efficiency", "attention_efficiency", "memory_efficiency",
})  # fmt: skip
"""The fields of a setup that decide nothing of what a rank holds, or only through what else is in the key."""
decides_holdings: Final = itemgetter(*(i for i, name in enumerate(Setup._fields) if name not in _NOT_HELD))
"""Returns the other fields of a setup."""
