# pyright: basic
"""DeepSpeed's AutoEP without the other ranks, and on the CPU as on a GPU.

A fake process group sends nothing, so the other ranks' counts of tokens are taken to be this rank's. On the CPU
AutoEP's Triton kernels allocate what they do on a GPU and compute nothing: `permute_rows` gathers rows into blocks for
each expert, and SwiGLU is one kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes


class FusedSwiGLU(torch.autograd.Function):
    """The autograd function _SwiGLUFn (deepspeed/ops/triton_ops/swiglu_triton.py). It saves gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        ctx.save_for_backward(gate, up)
        return out.fill_(0)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        return torch.empty_like(gate).fill_(0), torch.empty_like(up).fill_(0)


def _gathered(src: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Run gather_rows (moe/ep_kernels.py) without computing anything."""
    return torch.empty((index.numel(), src.contiguous().shape[1]), dtype=src.dtype).fill_(0)


def _filled(fill: Any) -> Any:
    """Wrap fill_indices_wrapper: one block of int32, filled by a kernel."""

    def indices(counts: Any, starts: Any, offsets: Any, experts: int, ranks: int, most: int) -> torch.Tensor:
        out = torch.full((most,), -1, dtype=torch.int32)
        with _disable_current_modes():
            out.copy_(fill(counts, starts, offsets, experts, ranks, most))
        return out

    return indices


def _exchanged(send: Any) -> Any:
    """Wrap an all-to-all of a fake group, which sends nothing: the received counts are those sent."""

    def all_to_all(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = send(output, given, *args, **kwargs)
        if output.dtype is torch.int32:
            with _disable_current_modes():
                output.copy_(given)
        else:
            output.zero_()
        return out

    return all_to_all


class _PlainRegistry(dict[str, Any]):
    """transformers' registry of recorded outputs as DeepSpeed 0.19.8 uses it, a dict of names; 5.23 looks up models."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key if isinstance(key, str) else str(key.__class__), value)

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key if isinstance(key, str) else str(key.__class__), {} if default is None else default)


@contextlib.contextmanager
def known_to_transformers() -> Iterator[None]:
    """Register AutoEP's blocks within a block of code as DeepSpeed expects transformers to."""
    from transformers.utils import output_capturing

    registry = _PlainRegistry(output_capturing._CAN_RECORD_REGISTRY)
    with mock.patch.object(output_capturing, "_CAN_RECORD_REGISTRY", registry):
        yield


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let every rank send what this one does, within a block."""
    import deepspeed.comm as comm

    with mock.patch.object(comm, "all_to_all_single", _exchanged(comm.all_to_all_single)):
        yield


@contextlib.contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Take the branches of a GPU with torch's grouped product (Hopper and newer) within a block."""
    from deepspeed.moe import ep_experts, ep_kernels

    swiglu = ep_experts.EXPERT_ACTIVATIONS["swiglu"]
    fused = mock.patch.dict(
        ep_experts.EXPERT_ACTIVATIONS,
        swiglu=ep_experts.ExpertActivation(
            swiglu.fn, lambda gate, up, *_: FusedSwiGLU.apply(gate, up), gate_fn=swiglu.gate_fn
        ),
    )
    with (
        fused,
        mock.patch.object(ep_kernels, "permute_rows_supported", lambda rows: True),
        mock.patch.object(ep_kernels, "gather_rows", _gathered),
        mock.patch.object(ep_kernels, "fill_indices_cpu", _filled(ep_kernels.fill_indices_cpu)),
    ):
        yield


@contextlib.contextmanager
def auto_ep_of_a_gpu() -> Iterator[None]:
    """Run a rank of a fake group on the CPU with all these patches within a block."""
    with kernels_of_a_gpu(), alone(), known_to_transformers():
        yield
