# pyright: basic
"""A policy of memcalc as the contexts that torch's checkpoint takes: torch keeps the results of the same ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memcalc.core.selective import ATTENTION, MAXIMUM, PRODUCT, REDUCE_SCATTER, Policy

_ATEN: Final = torch.ops.aten
OPS: Final[dict[Any, str]] = {
    _ATEN.mm.default: PRODUCT,
    torch.ops._c10d_functional.reduce_scatter_tensor.default: REDUCE_SCATTER,
    _ATEN.max.default: MAXIMUM,
    _ATEN._scaled_dot_product_flash_attention.default: ATTENTION,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: ATTENTION,
    _ATEN._scaled_dot_product_efficient_attention.default: ATTENTION,
    _ATEN._scaled_dot_product_cudnn_attention.default: ATTENTION,
}
"""The names that a policy has for torch's ops."""


def context_fn(policy: Policy) -> Callable[[], Any]:
    """Return a function for `checkpoint(…, use_reentrant=False, context_fn=…)` that makes the two contexts of one
    call."""
    return partial(_contexts, policy)


def _contexts(policy: Policy) -> Any:
    calls: Counter[tuple[str, bool]] = Counter()

    def chosen(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = OPS.get(op)
        if name is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        of = name, context.is_recompute  # torch 2.11 asks in the second run, too
        calls[of] += 1
        kept = policy(name, calls[of] - 1)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(chosen)
