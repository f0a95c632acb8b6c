"""Context parallelism with the kernels of the flash-attn package, which take the batch first (FlashAttention.forward in
transformer_engine/pytorch/attention/dot_product_attention/backends.py).

Megatron has the sequence first. So q, k and v are copied before, and the output is after. With one sequence both orders are
the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.ops.shape import clone
from memcalc.kernels.megatron import batch_first
from memcalc.megatron.context_parallel import shared_attention
from memcalc.megatron.context_parallel.exchanged import exchanged_attention
from memcalc.megatron.context_parallel.gathered_by_batch import gathered_attention_by_batch
from memcalc.megatron.context_parallel.ring import exchanged_ring_attention, ring_attention

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor
    from memcalc.megatron.context_parallel import SharedAttention

_OF_BATCHES: Final = {
    "p2p": ring_attention, "a2a": exchanged_attention, "all_gather": gathered_attention_by_batch,
}  # fmt: skip


def flash_attention(kind: str, exchanging: int = 1) -> SharedAttention:
    """Return the attention of ranks that share a sequence by one of `--cp-comm-type`'s ways, as `shared_attention` does."""

    def laid_out_by_batch(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> Tensor:
        if q.shape[0].size == 1:
            return shared_attention(kind, exchanging)(q, k, v, ranks)
        if kind == "a2a+p2p":
            by_batch = batch_first(q), batch_first(k), batch_first(v)
            return clone(exchanged_ring_attention(*by_batch, ranks, exchanging, clone))
        return clone(_OF_BATCHES[kind](batch_first(q), batch_first(k), batch_first(v), ranks, clone))

    return laid_out_by_batch
