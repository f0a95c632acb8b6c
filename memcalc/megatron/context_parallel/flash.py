"""Context parallelism with the kernels of the flash-attn package, which take the batch first (FlashAttention.forward in
transformer_engine/pytorch/attention/dot_product_attention/backends.py).

Megatron has the sequence first. So q, k and v are copied before, and the output is after. With one sequence both orders are
the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.ops.shape import clone
from memcalc.kernels.megatron import batch_first
from memcalc.megatron.context_parallel import ATTENTION
from memcalc.megatron.context_parallel.exchanged import exchanged_attention
from memcalc.megatron.context_parallel.ring import ring_attention

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor
    from memcalc.megatron.context_parallel import SharedAttention

_OF_BATCHES: Final = {"p2p": ring_attention, "a2a": exchanged_attention}
"""Gathered keys and values are copied once more in both layouts, which is not modelled."""


def flash_attention(kind: str) -> SharedAttention:
    """Return the attention of ranks that share a sequence by one of `--cp-comm-type`'s ways."""

    def laid_out_by_batch(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> Tensor:
        if q.shape[0].size == 1:
            return ATTENTION[kind](q, k, v, ranks)
        return clone(_OF_BATCHES[kind](batch_first(q), batch_first(k), batch_first(v), ranks, clone))

    return laid_out_by_batch
