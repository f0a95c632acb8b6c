# pyright: basic
"""What makes transformers' code go under fake tensors on the CPU the way it goes over real ones on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import _meta_registrations


@contextlib.contextmanager
def not_traced(*, padded: bool = False, encoder_decoder: bool = False) -> Iterator[None]:
    """Under fake tensors transformers believes that it is being traced and builds masks that a real run skips: it neither
    looks for packed sequences nor at the values of a padding mask. Here nothing is packed;
    `padded` keeps the masks of padding, which of an encoder and a decoder are the encoder's. Weights are not initialized:
    some ways to do so look at what is not there."""
    from transformers import PreTrainedModel, masking_utils

    initialize = PreTrainedModel.initialize_weights
    PreTrainedModel.initialize_weights = lambda self: None

    names = ["_ignore_causal_mask_sdpa"] if encoder_decoder or not padded else []
    names += [] if padded else ["_ignore_bidirectional_mask_sdpa"]
    skips = {name: getattr(masking_utils, name) for name in names}
    replaced = {"find_packed_sequence_indices": lambda position_ids: None} | {
        name: lambda padding_mask, *rest, original=original, **named: original(None, *rest, **named)
        for name, original in skips.items()
    }
    originals = {name: getattr(masking_utils, name) for name in replaced}
    for name, function in replaced.items():
        setattr(masking_utils, name, function)
    try:
        yield
    finally:
        PreTrainedModel.initialize_weights = initialize
        for name, function in originals.items():
            setattr(masking_utils, name, function)


def fused_as_on_cuda(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """sdpa as CUDA chooses it. The CPU has no fused kernel for values of another width than the keys', nor for a bias that
    wants a gradient."""
    biased = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    if query.shape[-1] == value.shape[-1] and not biased:
        return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    assert not enable_gqa
    if torch.is_autocast_enabled("cpu"):  # sdpa is on its list, the kernel that it calls is not
        dtype = torch.get_autocast_dtype("cpu")
        given: Any = (attn_mask, value, key, query)
        attn_mask, value, key, query = (t if t is None or not t.is_floating_point() else t.to(dtype) for t in given)
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # convert_boolean_attn_mask
        attn_mask = torch.where(attn_mask.logical_not(), float("-inf"), torch.zeros((), dtype=query.dtype))
    elif attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


_SDPA = torch.nn.functional.scaled_dot_product_attention


def grouped_mm_of_any_dtype(a: torch.Tensor, b: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Shape and strides of a grouped product: torch's own rule for fake tensors knows bf16 alone."""
    return _GROUPED_MM(a.bfloat16(), b.bfloat16(), *rest, **named).to(a.dtype)


_GROUPED_MM = _meta_registrations._meta_grouped_mm_common


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """Fake tensors may take kernels that the CPU does not have."""
    torch.nn.functional.scaled_dot_product_attention = fused_as_on_cuda
    _meta_registrations._meta_grouped_mm_common = grouped_mm_of_any_dtype
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = _SDPA
        _meta_registrations._meta_grouped_mm_common = _GROUPED_MM
