"""FLOPs of ops that really run, by the formulas of torch's FlopCounterMode (torch/utils/flop_counter.py).

It has none for grouped products and for the CPU's fused attention, which are given here. For the weight's gradient of a
convolution with groups it takes the channels of all groups, for each of which there is a product only with its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

ATEN: Any = torch.ops.aten


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return flop_registry[ATEN._scaled_dot_product_flash_attention](q, k, v)


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return flop_registry[ATEN._scaled_dot_product_flash_attention_backward](grad, q, k, v)


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """(rows, k) by a matrix (k, n) of each group, or (m, rows) by (rows, n) group by group."""
    assert a.dim() == 2
    return 2 * a.numel() * b.shape[-1]


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """The gradients of input and weight have as many products as forward: each of the result by each of the kernel."""
    return 2 * grad.numel() * weight[0].numel() * sum(rest[7][:2])


FORMULAS: dict[Any, Any] = dict(flop_registry) | {
    ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    ATEN._grouped_mm: _grouped,
    ATEN.convolution_backward: _convolution_backward,
}


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Of one op that a dispatch mode sees."""
    formula = FORMULAS.get(func._overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=out)
