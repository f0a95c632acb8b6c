"""What DDP really allocates and sends: torch's own DistributedDataParallel around transformers' model on CPU tensors, any rank
of a `fake` process group of any size, or one process of a real gloo group.

Tensors are real: DDP's reducer copies data in C++. Its buckets are made there too, where a dispatch mode does not look; a
communication hook, which does what the reducer does itself, shows them. Over gloo there is no hook.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cuda_autocast import cuda_lists_on_the_cpu
from fsdp2_oracle import ranks
from oracle import LiveBytes, build, checkpoint_first, make_optimizer
from per_op import CHECKPOINTS
from records import on_record
from torch.nn.parallel import DistributedDataParallel

Sent = list[tuple[str, str, int]]
"""The phase, the collective, and bytes of the full tensors, call by call."""


class RankMode(LiveBytes):
    """Live bytes of one rank, and what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = []
        self.phase = ""

    def enter(self, phase: str) -> None:
        self.begin()
        self.phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            kind = {"allreduce_": "all_reduce", "broadcast_": "broadcast"}[name]
            self.sent.append((self.phase, kind, sum(t.nbytes for t in args[0])))
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass
class Replicated:
    """Bytes of a steady step on one rank, and what it sent."""

    forward: int
    backward: int
    step: int
    sent: Sent


@on_record
def replicated_step(
    config: dict[str, Any],
    *,
    gpus: int,
    rank: int = 0,
    store: str = "",
    micro_batch_size: int = 1,
    seq_len: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    autocast: torch.dtype | None = None,
    recompute: str = "",
    recompute_layers: int | None = None,
    micro_batches: int = 1,
    syncs: bool = False,
    clips: bool = False,
    implementation: str = "fused",
) -> Replicated:
    """The reference step, gradients of all but the last micro-batch under `no_sync` unless it `syncs` each. In its second step
    DDP tells all ranks its new buckets: the third one is reported. `recompute`: a key of CHECKPOINTS."""
    mode = RankMode()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ranks(gpus, rank, store))
        if autocast is not None:
            stack.enter_context(cuda_lists_on_the_cpu())
        module = build(config, "sdpa", dtype)
        if recompute:
            module.gradient_checkpointing_enable(CHECKPOINTS[recompute])
        checkpoint_first(module, recompute_layers)
        model = DistributedDataParallel(module)
        if not store:
            model.register_comm_hook(mode, _hook)
        optimizer = make_optimizer("adamw", implementation, list(module.parameters()))
        ids = torch.zeros((micro_batch_size, seq_len), dtype=torch.int64)
        for tensor in [*module.parameters(), *module.buffers(), ids]:
            mode.register(tensor)
        stack.enter_context(mode)
        losses: list[Any] = [None]

        def micro_batch(reduces: bool) -> tuple[int, int]:
            mode.enter("forward")
            with contextlib.nullcontext() if reduces else model.no_sync():
                with torch.autocast("cpu", autocast, enabled=autocast is not None):
                    losses[0] = model(input_ids=ids, labels=ids).loss
                gc.collect()
                forward = mode.highest
                mode.enter("backward")
                losses[0].backward()
            return forward, mode.highest

        for _ in range(3):
            gc.collect()
            mode.sent = []
            peaks = [micro_batch(syncs or i == micro_batches - 1) for i in range(micro_batches)]
            mode.enter("step")
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        forwards, backwards = zip(*peaks, strict=True)
        return Replicated(max(forwards), max(backwards), mode.highest, mode.sent)


def _hook(mode, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations, and refuses ones that are strings
    buffer = bucket.buffer()
    mode.register(buffer)
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda _: buffer)
