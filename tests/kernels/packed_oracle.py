"""transformers' and TRL's step over packed rows, with a stand-in for flash-attn's kernels that saves and allocates what their
source says (flash_attn/flash_attn_interface.py, FlashAttnVarlenFunc; csrc/flash_attn/flash_api.cpp, mha_varlen_fwd and _bwd)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from tasks.trl_oracle import import_trl
from torch.autograd import Function
from transformers import masking_utils, modeling_flash_attention_utils

from memcalc.validate import fake, preference, run
from memcalc.validate.comparison import Comparison

_build, _make_batch, _batch_of, _not_traced = fake.build, fake.make_batch, preference.batch_of, fake.not_traced
_FLASH = "flash_attention_2"


class _Varlen(Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Any:
        wide = q.shape[2]
        if wide % 8:
            q, k, v = (torch.nn.functional.pad(x, [0, 8 - wide % 8]) for x in (q, k, v))
        assert q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype == v.dtype
        out = torch.empty_like(q)
        logsumexp = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        state = torch.empty((2,), dtype=torch.int64)
        ctx.save_for_backward(q, k, v, out, logsumexp, cu_seqlens_q, cu_seqlens_k, state)
        return out[..., :wide]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, _out, _logsumexp, cu_seqlens_q, _cu_seqlens_k, _state = ctx.saved_tensors
        wide = grad.shape[2]
        if wide % 8:
            grad = torch.nn.functional.pad(grad, [0, 8 - wide % 8])
        assert grad.stride(-1) == 1
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        total, heads, width = q.shape
        padded = total + 128 * (cu_seqlens_q.shape[0] - 1)
        multiple = 32 if width <= 128 else 64
        _softmax_d = torch.empty((heads, padded), dtype=torch.float32)
        _dq_accum = torch.empty((padded, heads, -(-width // multiple) * multiple), dtype=torch.float32)
        _expanded = [torch.empty((total, heads, width), dtype=q.dtype) for _ in range(2) if k.shape[1] != heads]
        return (*(x[..., :wide] for x in gradients), None, None)


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: float = 0.0,
    softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> Any:  # fmt: skip
    assert causal and isinstance(max_seqlen_q, int)
    return _Varlen.apply(q, k, v, cu_seqlens_q, cu_seqlens_k)


@contextlib.contextmanager
def flash_attn() -> Iterator[None]:
    utils: Any = modeling_flash_attention_utils
    own = {
        "_loaded_implementation": _FLASH,
        "_flash_varlen_fn": flash_attn_varlen_func,
        "_process_flash_kwargs_fn": utils._lazy_define_process_function(flash_attn_varlen_func),
    }
    with patch.multiple(utils, **own):
        yield


def collated(setup: Any, *, labels: bool) -> dict[str, Any]:
    """TRL's own collator's batch of rows that are one sequence each, or several of the one length that is given."""
    import_trl()
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    length = setup.seq_len if setup.lengths is None else int(setup.lengths.partition(":")[0])
    row = {"input_ids": [0] * setup.seq_len, "seq_lengths": [length] * (setup.seq_len // length)}
    rows = [row] * setup.micro_batch_size
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    batch["cu_seq_lens_k"] = batch["cu_seq_lens_q"].clone()  # each is sent to the GPU for itself
    if not labels:
        batch["labels"] = batch["input_ids"]
    return dict(batch)


class _Numbers(dict[str, Any]):
    """A batch whose values are not all tensors: those that the step counts are."""

    def values(self) -> Any:
        return [value for value in super().values() if isinstance(value, torch.Tensor)]


def make_batch(setup: Any, config: Any) -> Any:
    return _Numbers(collated(setup, labels=False))


def batch_of(setup: Any) -> Any:
    batch = collated(setup, labels=True)
    return _Numbers(batch | {"num_items_in_batch": torch.tensor(int((batch["labels"] != -100).sum()))})


def build(setup: Any, of: Any, fields: Any) -> Any:
    model = _build(setup._replace(attention="sdpa"), of, fields)
    if setup.attention == "flash":
        model.config._attn_implementation = _FLASH
    return model


@contextlib.contextmanager
def packed_masks(**named: bool) -> Iterator[None]:
    """As `not_traced`, with the search for packed sequences, which finds some."""
    find: Any = masking_utils.find_packed_sequence_indices
    with (
        _not_traced(**named),
        patch.multiple(masking_utils, find_packed_sequence_indices=find, is_tracing=lambda *_: True),
    ):
        yield


@contextlib.contextmanager
def packed_rows() -> Iterator[None]:
    """Give the steps of `memcalc validate` packed rows."""
    with (
        flash_attn(),
        patch.multiple(fake, build=build, make_batch=make_batch, not_traced=packed_masks),
        patch.object(preference, "batch_of", batch_of),
    ):
        yield


def validate(model: Any, **options: Any) -> Comparison:
    with packed_rows():
        return run.validate(model, packing=True, **options)
