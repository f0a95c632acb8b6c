# pyright: basic
"""Ops under a dispatch mode over CPU tensors, with the results and temporaries that they have on CUDA without one.

- Autograd adds a second gradient of a tensor into the first one, if nobody else holds that (input_buffer.cpp,
  can_accumulate_inplace). While a dispatch mode is on, it makes a third tensor.
- The backwards of an index, of topk and of gather write into fresh zeros (FunctionsManual.cpp), and the math kernel of attention
  adds its mask to the scores (aten/src/ATen/native/transformers/attention.cpp). While a dispatch mode is on, both make another
  tensor (areAnyTensorSubclassLike).
- The backward of softmax multiplies its gradient by its result first (softmax_backward_cuda_out in
  aten/src/ATen/native/cuda/SoftMax.cu).
- The softmax of the math kernel looks for rows that are masked as a whole (_safe_softmax in aten/src/ATen/native/SoftMax.cpp).
- The backward of fused attention takes what memcalc.core.ops.attention_scratch says.
- A singular value decomposition writes over a copy of the matrix.
- Layer norm's statistics are in fp32, whatever its input is (aten/src/ATen/native/cuda/layer_norm_kernel.cu).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from types import CodeType
from typing import Any, Final

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false

from memcalc.core.ops.attention_scratch import CUDNN_MORE, cudnn_bytes, efficient_width, flash_width

Run = Callable[[Any, Any, Any], Any]
Temporaries = tuple[torch.Tensor, ...]

_ATEN: Final = torch.ops.aten
_ADD: Final = _ATEN.add.Tensor
_INDEX_PUT: Final = _ATEN.index_put.default
_IN_PLACE: Final[dict[Any, Any]] = {
    _ADD: _ATEN.add_.Tensor,
    _INDEX_PUT: _ATEN.index_put_.default,
    _ATEN.scatter.src: _ATEN.scatter_.src,
    _ATEN.scatter_add.default: _ATEN.scatter_add_.default,
}
_SOFTMAX_BACKWARD: Final = _ATEN._softmax_backward_data.default
_SAFE_SOFTMAX: Final = _ATEN._safe_softmax.default
_LAYER_NORM: Final = _ATEN.native_layer_norm.default
_LAYER_NORM_BACKWARD: Final = _ATEN.native_layer_norm_backward.default
_ENGINE: Final = torch.autograd.graph._engine_run_backward.__code__
_HALF: Final = (torch.bfloat16, torch.float16)
_HOLDERS: Final = 3
"""The references to a gradient that only the buffer holds, besides one of each dispatch mode that passes it on."""
_REFERENCES: Final = 3
"""Python's references to it for each of these modes: a tuple of arguments, its copy, and a name; one more is of the line that
asks."""
_HOLDERS_OF_STORAGE: Final = 2  # the gradient, and Python's storage of the line that asks
_ATTENDS: Final = "fused_as_on_cuda"  # in memcalc.validate.realism: it calls torch's attention
_SCORES: Final = 4  # dims of attention scores


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op."""
    return func(*args, **kwargs)


def run_as_on_cuda(func: Any, args: Any, kwargs: Any, run: Run = call) -> tuple[Any, Temporaries]:
    """Return the result of an op, and what its kernel on CUDA allocates besides and frees at its end. `run` runs the op."""
    if func in _IN_PLACE and writes_in_place(func, args):
        return _IN_PLACE[func](*args, **kwargs), ()
    if func is _LAYER_NORM_BACKWARD:  # the CPU's takes statistics in the dtype of the input
        args = (*args[:3], *(x.to(args[1].dtype) for x in args[3:5]), *args[5:])
    out = run(func, args, kwargs)
    if func is _SOFTMAX_BACKWARD:
        return out, (torch.empty_like(args[0]),)
    if func is _SAFE_SOFTMAX:
        return out, (torch.empty_like(args[0], dtype=torch.bool),)
    if func in _SCRATCH:
        return out, _SCRATCH[func](*args, **kwargs)
    if func is _LAYER_NORM and args[0].dtype in _HALF:
        out, *statistics = out
        return (out, *(x.to(torch.float32) for x in statistics)), ()
    return out, ()


def _of_flash(grad: Any, q: Any, k: Any, v: Any, *rest: Any, attn_mask: Any = None, **named: Any) -> Temporaries:
    """Return the temporaries of flash attention's backward. With a mask, which only the CPU's takes, they are those of the
    kernel that takes it on a GPU."""
    if attn_mask is not None:
        return _of_efficient(grad, q, k, v)
    batch, heads, queries, width = q.shape
    out = (_in_fp32(q, q.shape[:3]), _in_fp32(q, (batch, queries, heads, flash_width(width))))
    if heads == k.shape[1]:
        return out
    return (*out, *(q.new_empty((batch, k.shape[2], heads, width)) for _ in range(2)))


def _of_efficient(grad: Any, q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Temporaries:
    batch, heads, queries, width = q.shape
    return _in_fp32(q, q.shape[:3]), _in_fp32(q, (batch, queries, heads, efficient_width(width)))


def _of_cudnn(grad: Any, q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Temporaries:
    nbytes = cudnn_bytes(q.shape[3], v.shape[3], q.itemsize, shared=q.shape[1] != k.shape[1])
    return (q.new_empty((prod(q.shape[:3]) * nbytes + CUDNN_MORE,), dtype=torch.uint8),)


def _in_fp32(like: torch.Tensor, shape: Any) -> torch.Tensor:
    return like.new_empty(tuple(shape), dtype=torch.float32)


def _of_svd(matrix: Any, *rest: Any, **named: Any) -> Temporaries:
    """Return the temporaries of cuSOLVER's decomposition without what its kernel borrows: a flag for each matrix, and the matrix
    by columns (svd_cusolver in aten/src/ATen/native/cuda/linalg/BatchLinearAlgebraLib.cpp)."""
    return matrix.new_empty(matrix.shape[:-2], dtype=torch.int32), matrix.new_empty(matrix.shape)


_SCRATCH: Final[dict[Any, Callable[..., Temporaries]]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: _of_flash,
    _ATEN._scaled_dot_product_flash_attention_backward.default: _of_flash,
    _ATEN._scaled_dot_product_efficient_attention_backward.default: _of_efficient,
    _ATEN._scaled_dot_product_cudnn_attention_backward.default: _of_cudnn,
    _ATEN._linalg_svd.default: _of_svd,
}


def writes_in_place(func: Any, args: Any) -> bool:
    """Tell whether a run without dispatch modes does this op in place, and nobody sees that."""
    caller, modes = _caller()
    if func is not _ADD:  # the gradient of what index_put wrote over has no fresh zeros to write into
        return caller is _ENGINE and (func is not _INDEX_PUT or args[3:] == (True,))
    if not isinstance(args[1], torch.Tensor):
        return False
    if caller is _ENGINE:
        return not torch.is_grad_enabled() and _is_the_buffers(args[0], modes)
    return caller is not None and caller.co_name == _ATTENDS and args[0].dim() == _SCORES


def _is_the_buffers(gradient: torch.Tensor, modes: int) -> bool:
    """Tell whether only the buffer of a node holds a gradient, and the gradient is no view."""
    storage = gradient.untyped_storage()._cdata
    return (
        gradient._use_count() == _HOLDERS + modes  # pyright: ignore[reportAttributeAccessIssue]
        and sys.getrefcount(gradient) == 1 + _REFERENCES * modes
        and torch._C._storage_Use_Count(storage) == _HOLDERS_OF_STORAGE
        and is_non_overlapping_and_dense_or_false(gradient)
    )


def _caller() -> tuple[CodeType | None, int]:
    """Return the code that has called the running op, seen through dispatch modes, and the number of these modes. None for the
    code of a tensor that unwraps itself."""
    modes: set[int] = set()
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name == "__torch_dispatch__" and "self" in frame.f_locals:
            modes.add(id(frame.f_locals["self"]))
        elif name == "__torch_dispatch__":
            return None, 0
        elif name not in _BETWEEN:
            return frame.f_code, len(modes)
        frame = frame.f_back
    return None, 0


_BETWEEN: Final = ("writes_in_place", "run_as_on_cuda", "__call__", "_fn", "inner")
"""The functions between a mode and the caller: ours, an op's own, and those that keep dynamo from compiling a mode."""
