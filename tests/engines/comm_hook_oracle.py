"""What DDP's own communication hooks allocate and send: torch's DistributedDataParallel around transformers' model on CPU
tensors, one rank of a `fake` process group, with the real hooks of torch/distributed/algorithms/ddp_comm_hooks.

The fake group's futures have no tensors in them. So `all_reduce` is a stand-in that notes the tensor, and whose future has it,
as the results of NCCL's have. It is done when it is called, so a hook runs from its begin to its end.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from ddp_oracle import RankMode
from fsdp2_oracle import ranks
from oracle import build, make_optimizer
from per_op import CHECKPOINTS
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

WARMUP = 2
"""The fewest steps before PowerSGD that PowerSGDState allows."""


@dataclass
class Hooked:
    """Bytes of a step on one rank, what it sent (dtype, elements), bytes that the hook's state keeps, and those of the
    buckets."""

    forward: int
    backward: int
    step: int
    sent: list[tuple[str, int]]
    kept: dict[str, int]
    buckets: int


class _Work:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([self.tensor])
        return future


def hooked_step(
    config: dict[str, Any],
    hook: str,
    *,
    rank: int = 1,
    compressed: bool = True,
    dtype: torch.dtype = torch.float32,
    micro_batches: int = 1,
    micro_batch_size: int = 1,
    seq_len: int = 16,
    recompute: str = "",
) -> Hooked:
    """The reference step, gradients of all but the last micro-batch under `no_sync`. The last of five steps is reported, or the
    third with a warm-up that is longer."""
    mode, sent = RankMode(), list[tuple[str, int]]()
    sizes: dict[int, int] = {}

    def all_reduce(tensor: torch.Tensor, **_: Any) -> _Work:
        sent.append((str(tensor.dtype).removeprefix("torch."), tensor.numel()))
        return _Work(tensor)

    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=WARMUP if compressed else 1000
    )
    real, given = _hooks(hook, state)

    def seen(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations, and refuses ones that are strings
        buffer = bucket.buffer()
        mode.register(buffer)
        before = buffer.untyped_storage().nbytes()
        future = real(given, bucket)
        after = bucket.buffer().untyped_storage().nbytes()
        mode.now += after - before  # a storage that is resized in its place
        sizes[bucket.index()] = after
        return future

    with (
        ranks(4),
        patch.object(dist, "all_reduce", all_reduce),
        patch.object(powerSGD_hook, "_orthogonalize", _batched),
    ):
        module = build(config, "sdpa", dtype)
        if recompute:
            module.gradient_checkpointing_enable(CHECKPOINTS[recompute])
        model = DistributedDataParallel(module)
        model.register_comm_hook(None, seen)
        optimizer = make_optimizer("adamw", "fused", list(module.parameters()))
        ids = torch.zeros((micro_batch_size, seq_len), dtype=torch.int64)
        for tensor in [*module.parameters(), *module.buffers(), ids]:
            mode.register(tensor)
        losses: list[Any] = [None]
        with mode:
            result = None
            for _ in range(WARMUP + 3 if compressed else 3):
                gc.collect()
                sent.clear()
                sizes.clear()
                forwards, backwards = [0], [0]
                for i in range(micro_batches):
                    mode.enter("forward")
                    if i + 1 < micro_batches:
                        with model.no_sync():
                            losses[0] = model(input_ids=ids, labels=ids).loss
                            gc.collect()
                            forwards.append(mode.highest)
                            mode.enter("backward")
                            losses[0].backward()
                    else:
                        losses[0] = model(input_ids=ids, labels=ids).loss
                        gc.collect()
                        forwards.append(mode.highest)
                        mode.enter("backward")
                        losses[0].backward()
                    backwards.append(mode.highest)
                mode.enter("step")
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                result = max(forwards), max(backwards), mode.highest
    assert result is not None
    kept = {
        name: sum(tensor.untyped_storage().nbytes() for tensor in getattr(state, name).values())
        for name in ("error_dict", "p_memory_dict", "q_memory_dict")
    }
    return Hooked(*result, [*sent], kept, sum(sizes.values()))


def _hooks(name: str, state: Any) -> tuple[Callable[[Any, Any], Any], Any]:
    return {
        "fp16": (default_hooks.fp16_compress_hook, None),
        "bf16": (default_hooks.bf16_compress_hook, None),
        "powersgd": (powerSGD_hook.powerSGD_hook, state),
        "batched-powersgd": (powerSGD_hook.batched_powerSGD_hook, state),
    }[name]


_real = powerSGD_hook._orthogonalize


def _batched(matrices: torch.Tensor, epsilon: float = 0) -> None:
    """batched_powerSGD_hook gives `_orthogonalize` one matrix, which it refuses: it takes a batch of them."""
    _real(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)
