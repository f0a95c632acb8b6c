# pyright: basic
"""Patches that make a module under fake tensors on the CPU take the same way as on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils import import_utils


@contextmanager
def gpu_dropout() -> Iterator[None]:
    """Run dropout as on a GPU within a block: one kernel that keeps a bool mask, and no own kernel within fused
    attention.

    On the CPU torch multiplies by a mask in the input's dtype, and attention with dropout is not fused.
    """

    def native_dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    def without_dropout(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **named: Any
    ) -> torch.Tensor:
        return attend(query, key, value, attn_mask, 0.0, *rest, **named)

    dropout, attend = functional.dropout, functional.scaled_dot_product_attention
    functional.dropout, functional.scaled_dot_product_attention = native_dropout, without_dropout
    try:
        yield
    finally:
        functional.dropout, functional.scaled_dot_product_attention = dropout, attend


@contextmanager
def not_taken_for_compiling() -> Iterator[None]:
    """Hide fake tensors from transformers within a block. Otherwise it assumes that it is being compiled, and builds
    masks that a real run does not."""
    original = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = lambda x: False
    try:
        yield
    finally:
        import_utils.is_fake_tensor = original


@contextmanager
def not_initialized() -> Iterator[None]:
    """Skip the initialization of weights within a block. Weights need no values, and some initializations read values
    that fake tensors lack. Weights are still tied."""
    original = PreTrainedModel.initialize_weights
    PreTrainedModel.initialize_weights = lambda self: None
    try:
        yield
    finally:
        PreTrainedModel.initialize_weights = original


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Turn off the cycle collector within a block, as the times of its runs are no property of a model. A collection by
    hand only looks at new objects.
    """
    enabled, freezes = gc.isenabled(), gc.get_freeze_count() == 0
    gc.disable()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if enabled:
            gc.enable()
