"""torchtitan's per-op policy of selective activation checkpointing, as a `context_fn` for torch.utils.checkpoint.

Written after torchtitan 0.2.2 (torchtitan/distributed/activation_checkpoint.py, _apply_op_sac; the ops to save in
torchtitan/models/llama3/infra/parallelize.py): the results of products of two matrices are saved and recomputed in turn, the
first one of a block is saved; those of fused attention and of reductions over ranks are saved; all else is recomputed.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_ATEN = torch.ops.aten
PRODUCT = _ATEN.mm.default
SAVED = {
    PRODUCT,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,  # not torchtitan's: what the CPU has for the one above
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_attention_math.default,
    _ATEN._scaled_dot_product_fused_attention_overrideable.default,
    _ATEN.max.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def per_op_contexts() -> Any:
    """The contexts of one block's forward and of its recomputation."""
    products = {run_again: count(1) for run_again in (False, True)}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_second = op is PRODUCT and next(products[context.is_recompute]) % 2 == 0
        return CheckpointPolicy.MUST_SAVE if op in SAVED and not is_second else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "full": {"use_reentrant": False},
    "op": {"use_reentrant": False, "context_fn": per_op_contexts},
}
"""What transformers' `gradient_checkpointing_enable` is given for `--recompute`."""
