# pyright: basic
"""Packed rows: the batch of TRL's padding-free collator, transformers' masks of it, and a stand-in for flash-attn's kernels.

These need a GPU. The stand-in saves and allocates what their source says (flash_attn/flash_attn_interface.py,
FlashAttnVarlenFunc; csrc/flash_attn/flash_api.cpp, mha_varlen_fwd and mha_varlen_bwd).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
from torch.autograd import Function
from transformers import masking_utils, modeling_flash_attention_utils

from memcalc.inputs.lengths import lengths_of
from memcalc.inputs.options import NOT_YET, refuse
from memcalc.validate.trainers import import_of_trl

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup

FLASH: Final = "flash_attention_2"
_FIND: Final[Any] = masking_utils.find_packed_sequence_indices
"""transformers' own search, which the run of rows that are not packed replaces."""


class _Varlen(Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Any:
        wide = q.shape[2]
        if wide % 8:
            q, k, v = (torch.nn.functional.pad(x, [0, 8 - wide % 8]) for x in (q, k, v))
        out = torch.empty_like(q)
        logsumexp = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        state = torch.empty((2,), dtype=torch.int64)
        ctx.save_for_backward(q, k, v, out, logsumexp, cu_seqlens_q, cu_seqlens_k, state)
        return out[..., :wide]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, _out, _logsumexp, cu_seqlens_q, _cu_seqlens_k, _state = ctx.saved_tensors
        wide = grad.shape[2]
        if wide % 8:
            grad = torch.nn.functional.pad(grad, [0, 8 - wide % 8])
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        total, heads, width = q.shape
        padded = total + 128 * (cu_seqlens_q.shape[0] - 1)
        multiple = 32 if width <= 128 else 64
        _softmax_d = torch.empty((heads, padded), dtype=torch.float32)
        _dq_accum = torch.empty((padded, heads, -(-width // multiple) * multiple), dtype=torch.float32)
        _expanded = [torch.empty((total, heads, width), dtype=q.dtype) for _ in range(2) if k.shape[1] != heads]
        return (*(x[..., :wide] for x in gradients), None, None)


def _flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: float = 0.0,
    softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> Any:  # fmt: skip
    return _Varlen.apply(q, k, v, cu_seqlens_q, cu_seqlens_k)


def check_lengths(setup: Setup) -> None:
    """Raise InputError for lengths of which no row is made here."""
    if setup.lengths is None or setup.seq_len is None:
        return
    given = lengths_of(setup.lengths)
    if given.mean != given.longest or setup.seq_len % given.longest:
        why = "rows are made of sequences of one length, which fill a row, in a run;"
        refuse("lengths", setup.lengths, f"{why} {NOT_YET}one length that divides {setup.seq_len}, or leave it out")


def batch_of(setup: Setup) -> dict[str, Any]:
    """Return the batch of TRL's own collator, of rows that are one sequence each, or several of the one length that is given.
    Raises InputError without TRL."""
    assert setup.seq_len is not None
    collator = import_of_trl("trl.trainer.sft_trainer", "--packing").DataCollatorForLanguageModeling
    length = setup.seq_len if setup.lengths is None else lengths_of(setup.lengths).longest
    row = {"input_ids": [0] * setup.seq_len, "seq_lengths": [length] * (setup.seq_len // length)}
    batch = dict(collator(pad_token_id=0, padding_free=True)([row] * setup.micro_batch_size))
    batch["cu_seq_lens_k"] = batch["cu_seq_lens_q"].clone()  # each is sent to the GPU for itself
    if setup.task == "pretrain":
        batch["labels"] = batch["input_ids"]
    else:
        batch["num_items_in_batch"] = torch.tensor(int((batch["labels"] != -100).sum()))
    return _Numbers(batch)


class _Numbers(dict[str, Any]):
    """A batch whose values are not all tensors: those that the step counts are."""

    def values(self) -> Any:
        return [value for value in super().values() if isinstance(value, torch.Tensor)]


@contextlib.contextmanager
def packed_rows() -> Iterator[None]:
    """Give transformers the stand-in, and let its masks look for packed sequences, which they find, within a block."""
    utils: Any = modeling_flash_attention_utils
    own = {
        "_loaded_implementation": FLASH,
        "_flash_varlen_fn": _flash_attn_varlen_func,
        "_process_flash_kwargs_fn": utils._lazy_define_process_function(_flash_attn_varlen_func),
    }
    with (
        patch.multiple(utils, **own),
        patch.multiple(masking_utils, find_packed_sequence_indices=_FIND, is_tracing=lambda *_: True),
    ):
        yield
