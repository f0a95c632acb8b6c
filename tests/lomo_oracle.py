"""What a step with LOMO or AdaLomo of the lomo-optim package really has: the reference step, whose backward updates the weights,
over fake tensors. Numbers that are read are 1: AdaLomo's learning rate is then a tensor, as it is for all but tiny weights."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from cuda_autocast import cuda_lists_on_the_cpu
from oracle import CHECKPOINTS, LiveBytes, batch_for, build, cuda_kernels, not_traced, sets_in_order
from torch._subclasses.fake_tensor import FakeTensorMode


class Numbers(LiveBytes):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass
class Fused:
    """Bytes of a step, the batch included."""

    resident: int
    states: int
    forward: int
    backward: int
    step: int


def fused_step(
    package: Any,
    config: dict[str, Any],
    *,
    optimizer: str,
    dtype: torch.dtype,
    micro_batch_size: int = 1,
    seq_len: int = 16,
    recompute: bool = False,
    autocast: torch.dtype | None = None,
) -> Fused:
    """The second step."""
    mode = Numbers()
    lists = contextlib.nullcontext() if autocast is None else cuda_lists_on_the_cpu()
    with (
        not_traced(padded=False, encoder_decoder=False), cuda_kernels(None), FakeTensorMode(allow_non_fake_inputs=True), lists,
        mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
    ):  # fmt: skip
        model = build(config, "sdpa", dtype)
        if recompute:
            model.gradient_checkpointing_enable(CHECKPOINTS["full"])
        for tensor in [*model.parameters(), *model.buffers()]:
            mode.register(tensor)
        batch = batch_for(model.config, micro_batch_size, seq_len, dtype)
        with mode, sets_in_order(model):
            for tensor in batch.values():
                mode.register(tensor)
            before = mode.now
            made = (package.AdaLomo if optimizer == "adalomo" else package.Lomo)(model, lr=1e-3)
            gc.collect()
            states, result = mode.now - before, None
            loss = torch.zeros(())
            for _ in range(2):
                gc.collect()
                start = mode.now
                mode.phase = "forward"
                mode.begin()
                with torch.autocast("cpu", autocast, enabled=autocast is not None):
                    out = model(**batch)
                loss = out.loss
                del out
                gc.collect()
                forward = mode.highest
                mode.phase = "backward"
                mode.begin()
                made.fused_backward(loss, 1e-3)
                backward = mode.highest
                mode.phase = "step"
                mode.begin()
                result = Fused(start, states, forward, backward, mode.highest)
    assert result is not None
    return result
