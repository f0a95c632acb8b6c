"""Core attention of GPTModel (core/transformer/attention.py): the kernel that a run takes, recomputed or not."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from memcalc.core.checkpoint import checkpoint
from memcalc.kernels import megatron as kernels
from memcalc.kernels.unfused_attention import unfused_attention
from memcalc.megatron.context_parallel import shared_attention
from memcalc.megatron.context_parallel.flash import flash_attention
from memcalc.megatron.joined import local_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Module
    from memcalc.megatron.layout import Layout


def core_attention(
    m: Module, layout: Layout, dropout: float, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None
) -> Tensor:
    """Run core attention. No fused kernel reads the mask, but a checkpoint keeps it
    (_checkpointed_attention_forward)."""
    memory, p = m.run.memory, dropout
    q, k, v = qkv
    with m / "core_attention":
        if m.run.attention == "unfused":
            inputs = q, k, v, mask, p
            return (
                checkpoint(memory, unfused_attention, *inputs, early_stop=False)
                if layout.selective
                else unfused_attention(*inputs)
            )
        if m.run.attention == "eager":
            if layout.selective:
                return checkpoint(memory, _unmasked(local_attention), mask, q, k, v, p, early_stop=False)
            return local_attention(q, k, v, p)
        kernel = kernels.te_flash_attention if m.run.attention == "flash" else kernels.te_fused_attention
        if layout.cp_comm_type is not None:
            shared = flash_attention if m.run.attention == "flash" else shared_attention
            kind, exchanging = layout.cp_comm_type, layout.exchanging
            kernel = partial(shared(kind, exchanging), ranks=layout.context_parallel)
        if layout.selective:
            return checkpoint(memory, _unmasked(kernel), mask, q, k, v, early_stop=False)
        return kernel(q, k, v)


def _unmasked(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a kernel that takes a mask as its first argument and ignores it."""

    def unmasked(_mask: Tensor | None, *inputs: Any) -> Tensor:
        return kernel(*inputs)

    return unmasked
