# pyright: basic
"""flash-attn over a padded batch: transformers' own code around a stand-in for the kernels (`memcalc.validate.packed`).

Tensors without data do not say which tokens are padding. Here none is, and yet the batch has a mask. What puts the output back
saves and allocates what flash-attn 2.8.3 flash_attn/bert_padding.py does (IndexPutFirstAxis).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import Function
from torch.nn.functional import pad
from transformers import masking_utils, modeling_flash_attention_utils

from memcalc.validate.packed import FLASH, _Varlen


@contextlib.contextmanager
def padding_taken_out() -> Iterator[None]:
    """Let transformers take padding out of flash-attn's operands within a block."""
    utils: Any = modeling_flash_attention_utils
    own = {"_get_unpad_data": _tokens_of, "_pad_fn": _pad_input, "_flash_varlen_fn": _varlen}
    masks: Any = masking_utils.AttentionMaskInterface._global_mapping
    with patch.multiple(utils, **own), patch.dict(masks, {FLASH: _mask}):
        yield


def _mask(*_sizes: Any, attention_mask: torch.Tensor, **_named: Any) -> torch.Tensor:
    """Run flash_attention_mask, which finds padding."""
    attention_mask.all()
    return attention_mask


def _tokens_of(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Run _get_unpad_data of a mask that is said to have no padding."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.empty((attention_mask.numel(), 1), dtype=torch.int64).flatten()
    lengths.max()
    return indices, pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0)), attention_mask.shape[1]


class _PutBack(Function):
    @staticmethod
    def forward(ctx: Any, values: Any, indices: Any, rows: int) -> Any:
        ctx.save_for_backward(indices)
        output = torch.zeros(rows, *values.shape[1:], dtype=values.dtype)
        output[indices] = values
        return output

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (indices,) = ctx.saved_tensors
        return grad[indices], None, None


def _pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    output: Any = _PutBack.apply(hidden_states, indices, batch * seqlen)
    return output.view(batch, seqlen, *output.shape[1:])


def _varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **_named: Any) -> Any:
    return _Varlen.apply(q, k, v, cu_seqlens_q, cu_seqlens_k)
