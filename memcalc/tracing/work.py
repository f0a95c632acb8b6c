# pyright: basic
"""The matrix products of a trace: torch's own formulas, and those that torch lacks (torch/utils/flop_counter.py)."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from memcalc.core.dims import Dim
from memcalc.core.ops.work import works
from memcalc.core.tensor import Memory, Streamed
from memcalc.tracing.modules import dtype_of

_ATEN: Final = torch.ops.aten


def _grouped(a: torch.Tensor, b: torch.Tensor, *_: object, **__: object) -> int:
    """Return the FLOPs of (rows, k) and (groups, k, n), or of (m, rows) and (rows, n): each row meets one group."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[-1]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


def _attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object
) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, **named: Any) -> int:
    """Return the FLOPs with the channels of one group; torch's formula takes all channels for the weight's gradient."""
    whole = flop_registry[_ATEN.convolution_backward](grad, x, weight, *rest, **named)
    groups, mask = rest[6], rest[7]
    if groups == 1 or not mask[1]:
        return whole
    both = (*rest[:7], [False, True, False])
    of_weight = flop_registry[_ATEN.convolution_backward](grad, x, weight, *both, **named)
    return whole - of_weight + of_weight // groups


LACKING: Final[dict[Any, Any]] = {
    _ATEN._grouped_mm: _grouped,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN.convolution_backward: _convolution_backward,
}
"""Formulas for ops that torch's counter does not count, or counts differently."""


def _kind(name: str) -> str:
    if "attention" in name:
        return "attention"
    if "conv" in name:
        return "convolution"
    return "grouped matmul" if "grouped" in name else "matmul"


_NO_KERNELS: Final = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""The ops that allocate a tensor and write nothing into it."""


def _streams(memory: Memory, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Record an op that multiplies no matrices, with the tensors that it reads and writes, unless it makes a view.

    An op that writes in place as on CUDA returns the tensor itself that it was given, which no view is.
    """
    name = func._schema.name.split("::")[1]
    read = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    written = [leaf for leaf in tree_iter(out) if isinstance(leaf, torch.Tensor)]
    old = {tensor.untyped_storage()._cdata for tensor in read}
    is_new = any(tensor.untyped_storage()._cdata not in old for tensor in written)
    is_given = any(tensor is other for tensor in written for other in read)
    if name in _NO_KERNELS or not (is_new or is_given or func._schema.is_mutable):
        return
    phase = "recomputation" if memory.recomputing else memory.phase
    operands = tuple(
        ((Dim("elements", tensor.untyped_storage().nbytes() // tensor.element_size()),), dtype_of(tensor.dtype))
        if 0 in tensor.stride()
        else ((Dim("elements", tensor.numel()),), dtype_of(tensor.dtype))
        for tensor in (*read, *written)
    )
    memory.streamed.append(Streamed(memory.scope, name, phase, memory.layer, operands))


def note(memory: Memory, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Record the products of an op, or the bytes that it moves if it has none."""
    packet = getattr(func, "_overloadpacket", None)
    formula = LACKING.get(packet) or flop_registry.get(packet)
    if formula is None:
        _streams(memory, func, args, kwargs, out)
        return
    flops = formula(*args, **kwargs, out_val=out)
    operand = next(a for a in args if isinstance(a, torch.Tensor))
    name = func._schema.name.split("::")[1]
    if flops:
        works(
            memory,
            name,
            (Dim("products", flops // 2),),
            dtype_of(operand.dtype),
            kind=_kind(name),
            is_causal=any(arg is True for arg in args),
        )
