"""Megatron-Core's fine-grained offloading of activations around its own layers with latent attention, on CPU tensors: the
manager, its groups and its order are the real ones; streams and events are nothing, and what is on the host has no bytes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron_layers_oracle import Ran
from oracle import LiveBytes
from recomputed_modules_oracle import latent_model
from torch.utils._python_dispatch import _disable_current_modes

from memcalc.families.base.architecture import Architecture


@contextlib.contextmanager
def _without_cuda() -> Iterator[None]:
    import megatron.core.extensions.transformer_engine as extension
    import megatron.core.pipeline_parallel.fine_grained_activation_offload as offloading

    nothing = mock.MagicMock()
    streams = SimpleNamespace(
        Event=nothing, Stream=nothing, current_stream=nothing, stream=lambda _: contextlib.nullcontext(),
        nvtx=nothing, is_available=lambda: False,
    )  # fmt: skip

    def offload(_: Any, tensor: torch.Tensor, pin_memory: bool = True, use_cpu_pool: bool = True) -> Any:
        tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
        with _disable_current_modes():
            return "cpu", torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), use_cpu_pool

    def reload(_: Any, state: Any, non_blocking: Any = None) -> torch.Tensor:
        return torch.empty(state[1].shape, dtype=state[1].dtype)

    handler: Any = offloading.ChunkOffloadHandler
    switch = SimpleNamespace(CPUOffloadEnabled=False)
    with (
        mock.patch.object(offloading, "torch", _Torch(streams)),
        mock.patch.object(handler, "offload", offload),
        mock.patch.object(handler, "reload", reload),
        mock.patch.object(offloading, "print_offload_summary_table", lambda _: None),
        mock.patch.object(torch.Tensor, "record_stream", lambda *_: None),
        mock.patch.object(extension, "cpu_offload", switch, create=True),
    ):
        yield


class _Torch:
    """torch with another `cuda`."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def offloading_step(
    a: Architecture,
    recomputed: tuple[str, ...],
    offloaded: tuple[str, ...],
    *,
    batch: int,
    seq: int,
    least: int,
    many: int,
) -> list[Ran]:
    """A step after the first one of `many` micro-batches, all forwards before all backwards: what each saves and needs."""
    import megatron.core.pipeline_parallel.fine_grained_activation_offload as offloading

    how = {
        "fine_grained_activation_offloading": bool(offloaded), "offload_modules": list(offloaded),
        "min_offloaded_tensor_size": least,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(_without_cuda())
        offloading.PipelineOffloadManager.reset_instance()
        mode, model, ids, mask = stack.enter_context(latent_model(a, recomputed, how, batch=batch, seq=seq, fake=False))
        step = partial(_step, mode, model, ids, mask, (seq, batch, a.hidden), many)
        with mode:
            step()
            offloading.PipelineOffloadManager.get_instance().reset()
            return step()


def _step(mode: LiveBytes, model: Any, ids: Any, mask: Any, shape: tuple[int, ...], many: int) -> list[Ran]:
    gc.collect()
    first, outs, ran = mode.now, list[Any](), list[Ran]()
    saved: list[tuple[int, int]] = []
    for _ in range(many):
        start, mode.phase = mode.now, "forward"
        mode.begin()
        model.set_input_tensor(torch.empty(shape, dtype=torch.bfloat16, requires_grad=True))
        outs.append(model(ids, ids, mask))
        model.decoder.input_tensor = None
        gc.collect()
        saved.append((mode.now - start, mode.highest - start))
    mode.phase = "backward"
    for i in range(many):
        mode.begin()
        out, outs[i] = outs[i], None
        out.backward(torch.empty(shape, dtype=torch.bfloat16))
        del out
        gc.collect()
        ran.append(Ran({}, *saved[i], mode.highest - first))
    return ran
