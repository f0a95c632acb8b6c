"""Rows of a node's memory: the activations that Megatron's ranks move to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.offload.activations import of_chunks

if TYPE_CHECKING:
    from memcalc.engines.rank import Rank
    from memcalc.offload.host import HostRow
    from memcalc.setup.setup import Setup


def on_host(rank: Rank, setup: Setup) -> list[HostRow]:
    """Return the rows of a node all of whose ranks keep as much as this one: what the micro-batches that are in flight have
    moved, the running one among them."""
    states = [
        tuple(count + (chunk == state.chunk) for chunk, count in enumerate(state.in_flight)) for state in rank.states
    ]
    ranks = min(setup.gpus, setup.gpus_per_node)
    return of_chunks(
        [profile.run.copied for profile in rank.profiles], states, ranks, rank.profiles[0].run.kernels.basis
    )
