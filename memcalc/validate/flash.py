# pyright: basic
"""flash-attn over rows of one length: transformers' own code around a stand-in for its kernels, which need a GPU.

The stand-in saves and allocates what their source says (flash-attn 2.8.3 flash_attn/flash_attn_interface.py, FlashAttnFunc;
csrc/flash_attn/flash_api.cpp, mha_fwd and mha_bwd), but for the parts that a forward of few heads and tokens is split into.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import Function
from transformers import modeling_flash_attention_utils

from memcalc.validate.packed import FLASH


class _Flash(Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        wide = q.shape[3]
        if wide % 8:
            q, k, v = (torch.nn.functional.pad(x, [0, 8 - wide % 8]) for x in (q, k, v))
        out = torch.empty_like(q)
        logsumexp = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        state = torch.empty((2,), dtype=torch.int64)
        ctx.save_for_backward(q, k, v, out, logsumexp, state)
        return out[..., :wide]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, _out, _logsumexp, _state = ctx.saved_tensors
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        wide = grad.shape[3]
        if wide % 8:
            grad = torch.nn.functional.pad(grad, [0, 8 - wide % 8])
        batch, tokens, heads, width = q.shape
        rounded = -(-tokens // 128) * 128
        multiple = 32 if width <= 128 else 64
        _softmax_d = torch.empty((batch, heads, rounded), dtype=torch.float32)
        _dq_accum = torch.empty((batch, rounded, heads, -(-width // multiple) * multiple), dtype=torch.float32)
        _expanded = [
            torch.empty((batch, k.shape[1], heads, width), dtype=q.dtype) for _ in range(2) if k.shape[2] != heads
        ]
        return tuple(x[..., :wide] for x in gradients)


def _flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    return _Flash.apply(q, k, v)


@contextlib.contextmanager
def built_with_flash_attn() -> Iterator[None]:
    """Let models that are built within a block have flash-attn's attention. It is named once a model is there:
    transformers looks for the package before."""
    from memcalc.validate import reference

    made = reference.to_run

    def to_run(config: Any, attention: str, *rest: Any) -> Any:
        model: Any = made(config, "sdpa" if attention == "flash" else attention, *rest)
        if attention == "flash":
            model.config._attn_implementation = FLASH
        return model

    with patch.object(reference, "to_run", to_run):
        yield


@contextlib.contextmanager
def kernels_of_flash_attn() -> Iterator[None]:
    """Give transformers the stand-in within a block."""
    utils: Any = modeling_flash_attention_utils
    own = {
        "_loaded_implementation": FLASH,
        "_flash_fn": _flash_attn_func,
        "_process_flash_kwargs_fn": utils._lazy_define_process_function(_flash_attn_func),
    }
    with patch.multiple(utils, **own):
        yield
