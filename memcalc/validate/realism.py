# pyright: basic
"""Patches that make transformers' code under fake tensors on the CPU take the way of real ones on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch._refs
from torch import _meta_registrations
from torch._prims_common import extract_shape_from_varargs, infer_size
from torch._subclasses import FakeTensor, FakeTensorMode, fake_impls
from torch.nn.attention import SDPBackend, sdpa_kernel

from memcalc.core.dtypes import bf16, fp16, fp32
from memcalc.kernels.attention_on_gpu import Fused, Operands


@contextlib.contextmanager
def not_traced(*, padded: bool = False, encoder_decoder: bool = False) -> Iterator[None]:
    """Hide fake tensors from transformers' masks within a block. Under them transformers assumes that it is being
    traced, and builds masks that a real run skips.

    It neither looks for packed sequences nor at the values of a padding mask. Here nothing is packed. `padded` keeps
    the masks of padding; with an encoder and a decoder these are the encoder's. Weights are not initialized: some
    initializations read values that fake tensors lack.
    """
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
    fused: Fused | None = None,
) -> torch.Tensor:
    """Run sdpa as CUDA chooses it, or as the GPU with these kernels does. The CPU has no fused kernel for values of
    another width than the keys', nor for a bias that wants a gradient."""
    biased = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    kernel = "" if fused is None else fused.kernel(_operands(query, key, value, attn_mask is not None))
    efficient = kernel == "efficient" and attn_mask is None
    if kernel == "math" or (query.shape[-1] == value.shape[-1] and not biased and not efficient and kernel != "cudnn"):
        with sdpa_kernel(SDPBackend.MATH) if kernel == "math" else contextlib.nullcontext():
            return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    assert not enable_gqa or query.shape[1] == key.shape[1] or kernel == "cudnn"
    if torch.is_autocast_enabled("cpu"):  # sdpa is on autocast's list, the kernel that it calls is not
        dtype = torch.get_autocast_dtype("cpu")
        given: Any = (attn_mask, value, key, query)
        attn_mask, value, key, query = (t if t is None or not t.is_floating_point() else t.to(dtype) for t in given)
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # convert_boolean_attn_mask
        attn_mask = torch.where(attn_mask.logical_not(), float("-inf"), torch.zeros((), dtype=query.dtype))
    if kernel == "cudnn" and not biased:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        return cudnn(query, key, value, attn_mask, True, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = aligned_bias(attn_mask).expand(*query.shape[:3], key.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def aligned_bias(bias: torch.Tensor) -> torch.Tensor:
    """Return the memory-efficient kernel's bias, in rows of multiples of 8 elements (preprocess_mask in
    native/transformers/attention.cpp)."""
    *rows, column = bias.stride()
    if column == 1 and not any(stride % 8 for stride in rows):
        return bias
    keys = bias.shape[-1]
    return torch.nn.functional.pad(bias, (0, 8 - keys % 8))[..., :keys]


def _operands(query: Any, key: Any, value: Any, masked: bool) -> Operands:
    """Return the properties that the choice of a kernel depends on."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    name = next(own for own, theirs in _DTYPES.items() if theirs is dtype)
    return Operands(name, query.shape[1], key.shape[1], query.shape[3], value.shape[3], masked)


_DTYPES = {fp32: torch.float32, fp16: torch.float16, bf16: torch.bfloat16}
_SDPA = torch.nn.functional.scaled_dot_product_attention


def grouped_mm_of_any_dtype(a: torch.Tensor, b: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Return the shape and strides of a grouped product. torch's own rule for fake tensors supports only bf16."""
    return _GROUPED_MM(a.bfloat16(), b.bfloat16(), *rest, **named).to(a.dtype)


_GROUPED_MM = _meta_registrations._meta_grouped_mm_common


def strided_as_real_views(a: torch.Tensor, *shape: Any, allow_copy: bool) -> torch.Tensor:
    """Return a view or reshape of a fake tensor with the strides of a real one (aten/src/ATen/TensorUtils.cpp,
    computeStride). torch's own rule for fake tensors keeps other strides of dims of one. Later ops lay out their
    results by these strides, and later reshapes copy or do not."""
    sizes = infer_size(extract_shape_from_varargs(shape, validate=False), a.numel())
    strides = fake_impls._compute_stride(a.shape, a.stride(), sizes) if a.numel() and a.ndim and sizes else None
    return _RESHAPE(a, *shape, allow_copy=allow_copy) if strides is None else a.as_strided(sizes, strides)


_RESHAPE = torch._refs._reshape_view_helper


def with_whole_storage(
    self: FakeTensorMode, state: Any, entry: Any, key: Any, func: Any, args: Any
) -> FakeTensor | None:
    """Return a cached result with its whole storage. If the result of an equal call is a slice of what was allocated
    (the gradient of an attention bias), torch makes the second storage only as long as the slice."""
    result = _REMEMBERED(self, state, entry, key, func, args)
    nbytes = None if entry.metadata is None or entry.view_idx is not None else entry.metadata.storage_bytes
    if result is not None and nbytes is not None and result.untyped_storage().nbytes() < nbytes:
        result.untyped_storage().resize_(nbytes)
    return result


_REMEMBERED = FakeTensorMode._get_output_tensor_from_cache_entry


@contextlib.contextmanager
def cuda_kernels(fused: Fused | None = None) -> Iterator[None]:
    """Let fake tensors take kernels that the CPU does not have within a block, and those of a known GPU. Their views
    have the strides of real ones, and their storages the bytes."""
    torch.nn.functional.scaled_dot_product_attention = partial(fused_as_on_cuda, fused=fused)
    _meta_registrations._meta_grouped_mm_common = grouped_mm_of_any_dtype
    torch._refs._reshape_view_helper = strided_as_real_views
    FakeTensorMode._get_output_tensor_from_cache_entry = with_whole_storage  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = _SDPA
        _meta_registrations._meta_grouped_mm_common = _GROUPED_MM
        torch._refs._reshape_view_helper = _RESHAPE
        FakeTensorMode._get_output_tensor_from_cache_entry = _REMEMBERED
