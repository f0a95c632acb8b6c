"""Transformer Engine's own UnfusedDotProductAttention, without the rest of the package: its classes are taken out of the
installed files, and run with two stand-ins for its fused softmax, which backward computes in place
(csrc/extensions/softmax.cpp).
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import os
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

_HERE = "transformer_engine/pytorch/attention/dot_product_attention/"
_PARTS = {
    "transformer_engine/pytorch/utils.py": ("attention_mask_func",),
    f"{_HERE}utils.py": ("get_full_mask",),
    f"{_HERE}softmax.py": ("_get_default_causal_mask", "ScaledMaskedSoftmax", "ScaledSoftmax", "FusedScaleMaskSoftmax"),
    f"{_HERE}backends.py": ("UnfusedDotProductAttention",),
}


@cache
def _taken() -> dict[str, Any]:
    scope: dict[str, Any] = {
        "torch": torch, "nn": torch.nn, "os": os, "nullcontext": contextlib.nullcontext, "_default_causal_mask": {},
        "THREADS_PER_WARP": 32, "THREADS_PER_BLOCK": 128, "is_in_onnx_export_mode": lambda: False,
        "QKVLayouts": ("sbhd_sbhd_sbhd",),
        "tex": SimpleNamespace(
            scaled_masked_softmax_forward=lambda x, _mask, _scale: torch.empty_like(x),
            scaled_masked_softmax_backward=lambda grad, _result, _scale: grad.contiguous(),
        ),
    }  # fmt: skip
    files = importlib.metadata.distribution("transformer-engine")
    for file, names in _PARTS.items():
        text = files.locate_file(file).read_text().replace('device="cuda"', 'device="cpu"')  # type: ignore[attr-defined]
        body = [node for node in ast.parse(text).body if getattr(node, "name", None) in names]
        assert len(body) == len(names), file
        module = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *body], [])
        exec(compile(ast.fix_missing_locations(module), file, "exec"), scope)
    scope["dpa_utils"] = SimpleNamespace(
        get_full_mask=scope["get_full_mask"], get_qkv_format=lambda *_: ("sbhd", "sbhd", "sbhd")
    )
    return scope


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> torch.Tensor:
    """q, k, v (seq, batch, heads, head_dim), the batch's mask (batch, 1, seq, seq): (seq, batch, heads·head_dim).

    Not the first layer, which makes the causal mask that all keep.
    """
    scope, seq = _taken(), q.shape[0]
    with _disable_current_modes():
        scope["_default_causal_mask"]["causal", seq, seq] = torch.ones((seq, seq), dtype=torch.bool)
    with mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")):
        core = scope["UnfusedDotProductAttention"](0.125, attention_dropout=dropout)
        core.scale_mask_softmax.softmax_in_fp32 = True
        return core({}, q, k, v, qkv_layout="sbhd_sbhd_sbhd", attn_mask_type="causal", attention_mask=mask)
