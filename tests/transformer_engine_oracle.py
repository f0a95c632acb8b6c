"""Transformer Engine's own context parallelism on one rank of a fake process group, under fake tensors.

Its Python (context_parallel.py) is the real one, loaded out of the installed package, which without its compiled parts cannot
be imported: those are stand-ins. Of what torch.compile fuses there (jit_fuser) the result alone counts, and of the kernels'
random states and the lengths of sequences, some 16 bytes each, nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron_oracle import Mode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

_FILE = "transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py"


class FusedMode(Mode):
    """Counts nothing of what runs inside a fused function but its result."""

    running: FusedMode | None = None

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0

    def __enter__(self) -> Any:
        FusedMode.running = self
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        mode = FusedMode.running
        assert mode is not None
        mode.inside += 1
        try:
            out = function(*args, **kwargs)
        finally:
            mode.inside -= 1
        if isinstance(out, torch.Tensor) and out.is_floating_point():  # the order of chunks is kept once for all layers
            mode.register(out)
        return out

    return call


def _forward_kernel(*args: Any, **_: Any) -> Any:
    """(seq, batch, heads, head_dim): the output, fp32 statistics of every query and head, the random state."""
    q, k, v = args[5:8]
    _count(sdpa_flop_count(*map(_by_head, (q, k, v))))
    seq, batch, heads, _width = q.shape
    out = torch.empty((seq, batch, heads, v.shape[3]), dtype=q.dtype)
    return out, [torch.empty((batch, heads, seq, 1), dtype=torch.float32), torch.empty(0, dtype=torch.int64)]


def _by_head(x: torch.Tensor) -> tuple[int, ...]:
    seq, batch, heads, width = x.shape
    return batch, heads, seq, width


def _count(flops: int) -> None:
    mode = FusedMode.running
    assert mode is not None
    mode.flops[mode.phase] += flops


def _backward_kernel(*args: Any, **_: Any) -> Any:
    q, k, v, out = args[4:8]
    _count(sdpa_backward_flop_count(*map(_by_head, (out, q, k, v))))
    return *(torch.empty_like(x) for x in args[4:7]), None


def _gathered(x: torch.Tensor, group: Any) -> Any:
    out = torch.empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]), dtype=x.dtype)
    return out, dist.all_gather_into_tensor(out, x.contiguous(), group=group)


def _scattered(x: torch.Tensor, group: Any) -> Any:
    out = torch.empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]), dtype=x.dtype)
    return out, dist.reduce_scatter_tensor(out, x.contiguous(), group=group)


class _Nothing:
    """Streams, events, names of kernels."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Never:
    """Nothing is an instance: 8-bit tensors."""


def _stand_ins() -> dict[str, dict[str, Any]]:
    """What context_parallel.py imports, by module under transformer_engine.pytorch."""
    return {
        "utils": {
            "get_cudnn_version": lambda: (9, 10, 0), "get_device_compute_capability": lambda: (9, 0),
            "nvtx_range_pop": _Nothing, "nvtx_range_push": _Nothing,
        },
        "cpp_extensions.fused_attn": {
            "fused_attn_fwd": _forward_kernel, "fused_attn_bwd": _backward_kernel,
            "FusedAttnBackend": {"F16_arbitrary_seqlen": None},
        },
        "quantization": {"FP8GlobalStateManager": mock.Mock()},
        "tensor.float8_tensor": {"Float8Tensor": _Never},
        "quantized_tensor": {
            "QuantizedTensorStorage": _Never, "prepare_for_saving": lambda *tensors: (tensors, None),
            "restore_from_saved": lambda _, tensors: tensors,
        },
        "jit": {"jit_fuser": _fused},
        "graph": {"is_graph_capturing": lambda: False},
        "constants": {"dist_group_type": dist.ProcessGroup, "TE_DType": {torch.bfloat16: None}},
        "distributed": {
            "get_distributed_world_size": dist.get_world_size, "get_distributed_rank": dist.get_rank,
            "gather_along_first_dim": _gathered, "reduce_scatter_along_first_dim": _scattered,
        },
        "attention.dot_product_attention.utils": {
            "FlashAttentionUtils": _Nothing(), "combine_and_quantize": None, "combine_and_dequantize": None,
            "print_quantizers": None, "get_attention_quantizers": lambda *_: (None,) * 6,
            "get_full_cu_seqlens": lambda *_: None,
        },
    }  # fmt: skip


@cache
def _context_parallel() -> Any:
    modules: dict[str, ModuleType] = {"transformer_engine_torch": ModuleType("transformer_engine_torch")}
    vars(modules["transformer_engine_torch"])["NVTE_Fused_Attn_Backend"] = _Nothing()
    for name, content in _stand_ins().items():
        parts = f"transformer_engine.pytorch.{name}".split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            modules.setdefault(path, ModuleType(path))
            if depth > 1:
                setattr(modules[".".join(parts[: depth - 1])], parts[depth - 1], modules[path])
        vars(modules[".".join(parts)]).update(content)
    file = importlib.metadata.distribution("transformer-engine").locate_file(_FILE)
    spec = importlib.util.spec_from_file_location("context_parallel", str(file))
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, modules):
        spec.loader.exec_module(loaded)
    return loaded


@contextlib.contextmanager
def one_rank(rank: int, ranks: int) -> Iterator[None]:
    """A rank of a context-parallel group, without CUDA's streams."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    with contextlib.ExitStack() as stack:
        for name in ("Stream", "Event", "current_stream"):
            stack.enter_context(mock.patch(f"torch.cuda.{name}", _Nothing))
        stack.enter_context(mock.patch("torch.cuda.stream", lambda *_: contextlib.nullcontext()))
        try:
            yield
        finally:
            dist.destroy_process_group()


def attention(kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """attn_forward_func_with_cp on this rank: q, k and v (seq/cp, batch, heads, head_dim), causal; `kind` as Megatron's
    `--cp-comm-type`."""
    ranks = dist.get_world_size()
    seq, lengths = q.shape[0] * ranks, torch.empty(0, dtype=torch.int32)
    return _context_parallel().attn_forward_func_with_cp(
        True, q, k, v, lengths, lengths, seq, seq, None, None, 0.0, dist.group.WORLD, list(range(ranks)), _Nothing(), kind,
        qkv_format="sbhd", attn_mask_type="causal", use_fused_attention=True, window_size=(-1, 0),
    )  # fmt: skip
