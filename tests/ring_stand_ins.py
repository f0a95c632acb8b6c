"""What of a GPU torch's context parallelism needs on the CPU: the fused attention kernels that its ring is made of, and how
transformers' modules run under it.

The kernels give tensors of the sizes, dtypes and strides that CUDA's give (torch/_meta_registrations.py), without data.
Ring, merging and collectives are torch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method

aten = torch.ops.aten
_LIBRARY = torch.library.Library("aten", "IMPL")
STATE = torch.uint64
"""Of the state of dropout's random numbers, of which nothing is counted."""


def _flash(query: Any, key: Any, value: Any, dropout_p: float = 0.0, *rest: Any, scale: Any = None) -> Any:
    logsumexp = torch.empty(query.shape[:3], dtype=torch.float32)
    state, unused, debug = torch.empty(2, dtype=STATE), torch.empty((), dtype=STATE), torch.empty(0)
    return torch.empty_like(query), logsumexp, None, None, query.shape[2], key.shape[2], state, unused, debug


def _flash_backward(grad_out: Any, query: Any, key: Any, value: Any, *rest: Any, scale: Any = None) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _heads_inside(like: torch.Tensor, width: int) -> torch.Tensor:
    return torch.empty_permuted((*like.shape[:3], width), (0, 2, 1, 3), dtype=like.dtype)


def _efficient(query: Any, key: Any, value: Any, bias: Any, *rest: Any, scale: Any = None) -> Any:
    assert bias is None
    logsumexp = torch.empty((*query.shape[:2], -(-query.shape[2] // 32) * 32), dtype=torch.float32)
    seed, offset = (torch.empty((), dtype=torch.int64) for _ in range(2))
    return _heads_inside(query, value.shape[3]), logsumexp, seed, offset


def _efficient_backward(grad_out: Any, query: Any, key: Any, value: Any, *rest: Any, scale: Any = None) -> Any:
    return *(_heads_inside(x, x.shape[3]) for x in (query, key, value)), None


_LIBRARY.impl("_scaled_dot_product_flash_attention", _flash, "CPU")
_LIBRARY.impl("_scaled_dot_product_flash_attention_backward", _flash_backward, "CPU")
_LIBRARY.impl("_scaled_dot_product_efficient_attention", _efficient, "CPU")
_LIBRARY.impl("_scaled_dot_product_efficient_attention_backward", _efficient_backward, "CPU")


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that CUDA takes: flash for 16 bits, the memory-efficient one for 32 or for values of another width than
    the keys', which knows neither grouped heads."""
    if query.dtype is not torch.float32 and query.shape[3] == value.shape[3]:
        assert attn_mask is None
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    assert not enable_gqa or query.shape[1] == key.shape[1], "the math kernel"
    kernel = aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def logsigmoid(x: torch.Tensor) -> torch.Tensor:
    """On CUDA without the buffer that the CPU's backward would want."""
    return torch.empty_like(x)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """torch's ring and its merging take CUDA's kernels."""
    names = {"scaled_dot_product_attention": scaled_dot_product_attention, "logsigmoid": logsigmoid}
    own = {name: getattr(torch.nn.functional, name) for name in names}
    for name, function in names.items():
        setattr(torch.nn.functional, name, function)
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(torch.nn.functional, name, function)


def without_masks(model: torch.nn.Module) -> None:
    """What accelerate's `prepare` does to a model (big_modeling.py, _attach_context_parallel_hooks): the attention gets no
    mask and is causal."""

    def without(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "attention_mask" in kwargs:
            kwargs["attention_mask"], kwargs["is_causal"] = None, True
        return args, kwargs

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(without, with_kwargs=True, prepend=True)


@contextlib.contextmanager
def shared_sequence(mesh: Any, batch: dict[str, torch.Tensor], rotate: str) -> Iterator[None]:
    """accelerate's `maybe_context_parallel` over what transformers' Trainer gives it."""
    with shared_tensors(mesh, list(batch.values()), [], rotate):
        yield


@contextlib.contextmanager
def shared_tensors(mesh: Any, batch: list[torch.Tensor], kept: list[torch.Tensor], rotate: str) -> Iterator[None]:
    """torch's context over the batch and over what is made whole again when it ends."""
    set_rotate_method(rotate)
    buffers = [*batch, *kept]
    dims = [1] * len(buffers)
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(batch)):
        yield
