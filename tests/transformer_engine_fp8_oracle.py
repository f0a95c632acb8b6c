"""Transformer Engine's own linear layers in fp8, over CPU tensors, on one rank of a fake process group.

Their Python (module/linear.py, layernorm_linear.py, grouped_linear.py and the tensors in fp8) is the real one, loaded out of the
installed package, which without its compiled parts cannot be imported. Its kernels are stand-ins: they allocate what
csrc/quantizer.cpp, csrc/extensions/normalization.cpp and csrc/extensions/gemm.cpp allocate, and compute nothing. What is counted
leaves out what is smaller than a kilobyte: scales of whole tensors, and counters.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron_oracle import Mode
from torch.testing._internal.distributed.fake_pg import FakeStore

HOPPER, BLACKWELL = (9, 0), (10, 0)
_LEAST = 1024


class _Name:
    """A member of an enumeration of the compiled part."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        out = _Name(f"{self.name}.{name}")
        setattr(self, name, out)
        return out

    def __int__(self) -> int:
        return 0

    __index__ = __int__


class _Compiled(ModuleType):
    """transformer_engine_torch: kernels that allocate, and names."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        out = _Name(name)
        setattr(self, name, out)
        return out


class _Indices:
    """FP8FwdTensors and FP8BwdTensors: three tensors for each product."""

    GEMM1_INPUT = GRAD_OUTPUT1 = 0
    GEMM1_WEIGHT = GRAD_INPUT1 = 1
    GEMM1_OUTPUT = GRAD_OUTPUT2 = 2


def _package(name: str, path: Path) -> ModuleType:
    out = ModuleType(name)
    out.__path__ = [str(path)]
    return out


@cache
def _modules() -> dict[str, ModuleType]:
    """Load Transformer Engine's modules; {} if it is not installed."""
    try:
        root = Path(str(importlib.metadata.distribution("transformer-engine").locate_file("transformer_engine")))
    except importlib.metadata.PackageNotFoundError:
        return {}
    named = {
        "transformer_engine": _package("transformer_engine", root),
        "transformer_engine.common": _package("transformer_engine.common", root / "common"),
        "transformer_engine.pytorch": _package("transformer_engine.pytorch", root / "pytorch"),
        "transformer_engine.pytorch.module": _package("transformer_engine.pytorch.module", root / "pytorch/module"),
        "transformer_engine.pytorch.onnx_extensions": _Compiled("onnx_extensions"),
        "transformer_engine.pytorch.triton.pad": _Compiled("pad"),
        "transformer_engine_torch": _Compiled("transformer_engine_torch"),
    }
    kept = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0].startswith("transformer_engine")
    }
    for name in kept:
        del sys.modules[name]
    try:
        sys.modules.update(named)
        for short in (
            "tensor",
            "module.linear",
            "module.layernorm_linear",
            "module.grouped_linear",
            "module.fp8_padding",
        ):
            importlib.import_module(f"transformer_engine.pytorch.{short}")
        out = {n: m for n, m in sys.modules.items() if n.partition(".")[0].startswith("transformer_engine")}
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0].startswith("transformer_engine")]:
            del sys.modules[name]
        sys.modules.update(kept)
    return out


def _of(name: str) -> Any:
    return _modules()[f"transformer_engine.pytorch.{name}"]


# --- the kernels


def _bytes(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8)


def _made(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype, capability: tuple[int, int]) -> Any:
    """Return what `Quantizer::create_tensor` of the quantizer's kind makes."""
    rowwise, columnwise, kind = quantizer.rowwise_usage, quantizer.columnwise_usage, type(quantizer).__name__
    columns, formats = shape[-1], _modules()["transformer_engine_torch"].Float8BlockScaleTensorFormat
    more: dict[str, Any] = {} if quantizer.internal else {"shape": shape, "dtype": dtype}
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        tensors = _of("tensor.float8_tensor"), _of("tensor.storage.float8_tensor_storage")
        made = tensors[1].Float8TensorStorage if quantizer.internal else tensors[0].Float8Tensor
        twice = capability < BLACKWELL
        data = _bytes(*shape) if rowwise or not twice else None
        transpose = _bytes(columns, *shape[:-1]) if columnwise and twice else None
        scale = torch.empty(1, dtype=torch.float32)
        return made(
            data=data,
            data_transpose=transpose,
            fp8_scale_inv=scale,
            fp8_dtype=quantizer.dtype,
            quantizer=quantizer,
            **more,
        )
    of_rows, of_columns = (_scales(quantizer, shape, of_columns) for of_columns in (False, True))
    if kind == "MXFP8Quantizer":
        tensors = _of("tensor.mxfp8_tensor"), _of("tensor.storage.mxfp8_tensor_storage")
        made, scales = (tensors[1].MXFP8TensorStorage if quantizer.internal else tensors[0].MXFP8Tensor), torch.uint8
        transposed = shape
    else:
        tensors = _of("tensor.float8_blockwise_tensor"), _of("tensor.storage.float8_blockwise_tensor_storage")
        made = tensors[1].Float8BlockwiseQTensorStorage if quantizer.internal else tensors[0].Float8BlockwiseQTensor
        scales, transposed = torch.float32, quantizer.get_columnwise_shape(shape)
        more |= {
            "is_2D_scaled": quantizer.block_scaling_dim == 2,
            "data_format": formats.COMPACT if quantizer.all_gather_usage else formats.GEMM_READY,
        }
    return made(
        rowwise_data=_bytes(*shape) if rowwise else None,
        rowwise_scale_inv=torch.empty(of_rows, dtype=scales) if rowwise else None,
        columnwise_data=_bytes(*transposed) if columnwise else None,
        columnwise_scale_inv=torch.empty(of_columns, dtype=scales) if columnwise else None,
        fp8_dtype=quantizer.dtype, quantizer=quantizer, **more,
    )  # fmt: skip


def _scales(quantizer: Any, shape: tuple[int, ...], of_columns: bool) -> tuple[int, ...]:
    """The shape of the scales of blocks (`get_scale_shape`)."""
    if hasattr(quantizer, "get_scale_shape"):
        return quantizer.get_scale_shape(shape, of_columns)
    rows, columns = torch.Size(shape[:-1]).numel(), shape[-1]
    if of_columns:
        return -(-rows // 32 // 4) * 4, -(-columns // 128) * 128
    return -(-rows // 128) * 128, -(-columns // 32 // 4) * 4


def _matrix(x: Any) -> tuple[int, int]:
    """The rows and columns of a tensor, whichever of its data it has."""
    kind = type(x).__name__
    if kind.startswith("Float8Tensor"):
        data, transposed = (x._data, False) if x._data is not None else (x._transpose, True)
    elif kind.startswith(("MXFP8", "Float8Blockwise")):
        rowwise = x._rowwise_data is not None
        data = x._rowwise_data if rowwise else x._columnwise_data
        transposed = not rowwise and kind.startswith("Float8Blockwise")
    else:
        data, transposed = x, False
    columns = data.shape[0] if transposed else data.shape[-1]
    return data.numel() // columns, columns


class _Kernels(NamedTuple):
    capability: tuple[int, int]

    def quantize(self, x: torch.Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
        return _made(quantizer, tuple(x.shape), x.dtype, self.capability) if out is None else out

    def bgrad_quantize(self, x: torch.Tensor, quantizer: Any) -> Any:
        made = _made(quantizer, tuple(x.shape), x.dtype, self.capability)
        return torch.empty(x.shape[-1], dtype=x.dtype), made

    def split_quantize(self, x: torch.Tensor, splits: Any, quantizers: Any) -> Any:
        return [_made(q, (n, x.shape[-1]), x.dtype, self.capability) for q, n in zip(quantizers, splits, strict=True)]

    def fp8_transpose(self, data: torch.Tensor, dtype: Any, out: Any = None) -> torch.Tensor:
        return _bytes(data.shape[-1], *data.shape[:-1]) if out is None else out

    def norm(self, statistics: int, x: torch.Tensor, *rest: Any) -> Any:
        quantizer = rest[-4]
        of_rows = [torch.empty(x.shape[0], dtype=torch.float32) for _ in range(statistics)]
        kind = type(quantizer).__name__
        if quantizer is None:
            out: Any = torch.empty_like(x)
        else:
            out = _made(quantizer, tuple(x.shape), x.dtype, self.capability)
            if kind != "Float8Quantizer":
                _unquantized = torch.empty_like(x)
        return out, (of_rows[0] if statistics == 2 else None), of_rows[-1]

    def norm_backward(self, weights: int, x: torch.Tensor, *rest: Any) -> Any:
        weight = rest[-3]
        return torch.empty_like(x), *(torch.empty_like(weight) for _ in range(weights))

    def generic_gemm(
        self, a: Any, transa: bool, b: Any, transb: bool, out: Any, _q: Any, _d: Any, *rest: Any, **_: Any
    ) -> Any:
        bias, grad = rest[0], rest[4]
        (out_of_a, in_of_a), (rows, columns) = _matrix(a), _matrix(b)
        if out is None:
            shape = (columns, in_of_a) if transb else (rows, out_of_a if transa else in_of_a)
            out = torch.empty(shape, dtype=torch.bfloat16)
        of_bias = torch.empty(columns, dtype=torch.bfloat16) if grad and bias is not None else None
        return out, of_bias, None, None

    def te_general_grouped_gemm(self, *args: Any) -> Any:
        return args[7]

    def rows_padded(self, *_: Any) -> None: ...


def _installed(capability: tuple[int, int]) -> dict[str, Any]:
    kernels = _Kernels(capability)
    return {
        "quantize": kernels.quantize, "bgrad_quantize": kernels.bgrad_quantize, "split_quantize": kernels.split_quantize,
        "fp8_transpose": kernels.fp8_transpose, "rmsnorm_fwd": lambda *args: kernels.norm(1, *args),
        "layernorm_fwd": lambda *args: kernels.norm(2, *args), "rmsnorm_bwd": lambda _, *args: kernels.norm_backward(1, *args),
        "layernorm_bwd": lambda _, *args: kernels.norm_backward(2, *args),
        "generic_gemm": kernels.generic_gemm, "te_general_grouped_gemm": kernels.te_general_grouped_gemm,
        "fused_multi_row_padding": kernels.rows_padded, "fused_multi_row_unpadding": kernels.rows_padded,
        "fused_amax_and_scale_update_after_reduction": kernels.rows_padded, "get_num_cublas_streams": lambda: 1,
        "FP8FwdTensors": _Indices, "FP8BwdTensors": _Indices,
    }  # fmt: skip


# --- a rank


def _on_cpu(function: Any) -> Any:
    """Let a function that makes a tensor on CUDA's device make it on the CPU."""
    return lambda *args, **kwargs: function(*args, **{**kwargs, **({"device": "cpu"} if "device" in kwargs else {})})


class Fp8Mode(Mode):
    """Counts tensors of a kilobyte or more."""

    def register(self, tensor: torch.Tensor) -> int:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.untyped_storage().nbytes() < _LEAST:
            return 0
        return super().register(tensor)


def recipe_of(name: str) -> Any:
    """Return the recipe that get_fp8_recipe of megatron/core/fp8_utils.py makes of `--fp8-recipe`."""
    recipes = sys.modules.get("transformer_engine.common.recipe") or _modules()["transformer_engine.common.recipe"]
    kinds = {
        "delayed": "DelayedScaling", "tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
    }  # fmt: skip
    return getattr(recipes, kinds[name])()


@contextlib.contextmanager
def one_rank(ranks: int, recipe: str, capability: tuple[int, int] = HOPPER) -> Iterator[Any]:
    """A rank of a tensor-parallel group inside `fp8_autocast`. Yields the group."""
    if not _modules():
        pytest.skip("Transformer Engine is not installed")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    compiled = _modules()["transformer_engine_torch"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.is_available", lambda: True))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", True))
        stack.enter_context(mock.patch("torch.cuda.device", lambda *_: contextlib.nullcontext()))
        stack.enter_context(mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")))
        stack.enter_context(mock.patch("torch.cuda.is_current_stream_capturing", lambda: False))
        stack.enter_context(mock.patch.dict(sys.modules, _modules()))
        for name in ("empty", "zeros", "ones", "empty_like"):
            stack.enter_context(mock.patch.object(torch, name, _on_cpu(getattr(torch, name))))
        for name, function in _installed(capability).items():
            for module in (compiled, _of("cpp_extensions")):  # which has all names of the compiled part
                stack.enter_context(mock.patch.object(module, name, function, create=True))
        for module in {id(m): m for m in _modules().values()}.values():
            for name, value in {
                "is_non_tn_fp8_gemm_supported": lambda: capability >= BLACKWELL,
                "get_device_compute_capability": lambda: capability,
                "get_cublas_workspace": lambda *_: [_EMPTY] if _[2] else _EMPTY,
                "get_sm_count": lambda: 132,
                "_empty_tensor": lambda: torch.empty(0),
            }.items():
                if name in vars(module):
                    stack.enter_context(mock.patch.object(module, name, value))
        together = mock.patch.object(dist, "_coalescing_manager", lambda **_: contextlib.nullcontext(mock.Mock()))
        stack.enter_context(together)  # what is gathered together is counted one by one
        quantization = _of("quantization")
        enabled = recipe_of(recipe)
        manager = quantization.FP8GlobalStateManager
        stack.enter_context(mock.patch.object(quantization, "check_recipe_support", lambda _: None))
        for name in ("fp8", "mxfp8", "fp8_block_scaling"):
            stack.enter_context(mock.patch.object(manager, f"is_{name}_available", classmethod(lambda _: (True, ""))))
        group: Any = dist.group.WORLD
        try:
            with quantization.autocast(enabled=True, recipe=enabled, amax_reduction_group=group):
                yield group
        finally:
            manager.reset()
            dist.destroy_process_group()


_EMPTY = torch.empty(0, dtype=torch.uint8)


def layer(kind: str, *args: Any, **kwargs: Any) -> Any:
    """Return a module of Transformer Engine: Linear, LayerNormLinear, GroupedLinear, Fp8Padding, Fp8Unpadding."""
    files = {"Linear": "linear", "LayerNormLinear": "layernorm_linear", "GroupedLinear": "grouped_linear"}
    return getattr(_of(f"module.{files.get(kind, kind.lower().replace('fp8', 'fp8_'))}"), kind)(*args, **kwargs)
