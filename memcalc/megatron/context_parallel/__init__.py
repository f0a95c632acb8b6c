"""Attention over a sequence that several ranks share, after Transformer Engine 2.11's context_parallel.py.

`--cp-comm-type` takes Megatron's own names. Keys and values are sent around a ring (`p2p`) or gathered (`all_gather`),
or heads are exchanged for tokens (`a2a`, Ulysses: arXiv 2309.14509), or both (`a2a+p2p`). Each function takes q
(batch, heads, seq/cp, head_dim), k and v with their heads, and the number of ranks, and returns (batch, seq/cp, heads,
head_dim).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from memcalc.megatron.context_parallel.exchanged import exchanged_attention
from memcalc.megatron.context_parallel.gathered import gathered_attention
from memcalc.megatron.context_parallel.ring import exchanged_ring_attention, ring_attention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.core.tensor import Tensor


class SharedAttention(Protocol):
    """Attention over q, k and v of this rank's tokens. `ranks` ranks share the sequence."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ranks: int) -> Tensor: ...


ATTENTION: Final[Mapping[str, SharedAttention]] = {
    "p2p": ring_attention,
    "all_gather": gathered_attention,
    "a2a": exchanged_attention,
}


def shared_attention(kind: str, exchanging: int = 1) -> SharedAttention:
    """Return the attention of ranks that share a sequence by one of `--cp-comm-type`'s ways. `exchanging`: the ranks that
    exchange heads before a ring, with `a2a+p2p`."""
    return partial(exchanged_ring_attention, exchanging=exchanging) if kind == "a2a+p2p" else ATTENTION[kind]
