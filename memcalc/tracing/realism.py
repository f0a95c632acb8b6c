# pyright: basic
"""What makes a module go under fake tensors on the CPU the way it goes on a GPU."""

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
    """Dropout as on a GPU: one kernel that keeps a mask of bools, and nothing of its own within fused attention.

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
    """Fake tensors make transformers believe that it is being compiled, and build masks that a real run does without."""
    original = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = lambda x: False
    try:
        yield
    finally:
        import_utils.is_fake_tensor = original


@contextmanager
def not_initialized() -> Iterator[None]:
    """Weights need no values, and some ways to make them look at what is not there. Tying is no part of it."""
    original = PreTrainedModel.initialize_weights
    PreTrainedModel.initialize_weights = lambda self: None
    try:
        yield
    finally:
        PreTrainedModel.initialize_weights = original


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Without the cycle collector, whose moments are no property of a model; by hand it looks at what is new only."""
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
