"""What FSDP1 really allocates and sends: transformers' model in `FullyShardedDataParallel`, autograd and AdamW, on one rank of a
`fake` process group of any size.

FSDP1 frees gathered parameters by resizing their storages, which a dispatch mode does not see; so its two functions for that
are wrapped. CPU tensors have no streams, so nothing waits for another stream's event: lives are those of the objects. Tensors
are real ones that are not touched: FSDP1 compares pointers.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest import mock

import torch
from fsdp2_oracle import RankMode, Sent, layers, ranks
from oracle import build, cuda_kernels, not_traced
from per_op import CHECKPOINTS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    _flat_param,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from memcalc.validate.untouched import Untouched


class Counting(RankMode):
    """Also what FSDP1 sends: on the CPU it gathers into a list of chunks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._schema.name == "c10d::allgather_":
            (chunks,) = args[0]
            self.sent.append(("all_gather", sum(t.nbytes for t in chunks), len(chunks)))
            return super(RankMode, self).__torch_dispatch__(func, types, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass
class Sharded:
    """Bytes of the third step on one rank, and what it sent."""

    resident: int
    """After `zero_grad`, when the gradients' shards still wait for the next forward."""
    parameters: int
    states: int
    gradients: int
    forward_end: int
    forward: int
    backward: int
    step: int
    sent: list[Sent]
    shapes: dict[str, tuple[int, ...]]


class _Event:
    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def resizing(mode: RankMode) -> Iterator[None]:
    """FSDP1's storages are resized under the eyes of `mode`."""
    own = _flat_param._alloc_storage, _flat_param._free_storage

    def alloc_storage(tensor: torch.Tensor, size: torch.Size) -> None:
        mode.resize(tensor, size.numel() * tensor.itemsize)

    _flat_param._alloc_storage = alloc_storage
    _flat_param._free_storage = lambda tensor: mode.resize(tensor, 0)
    try:
        with mock.patch.object(torch.cpu, "Event", _Event, create=True):
            yield
    finally:
        _flat_param._alloc_storage, _flat_param._free_storage = own


STRATEGIES = {
    (3, False): ShardingStrategy.FULL_SHARD,
    (2, False): ShardingStrategy.SHARD_GRAD_OP,
    (3, True): ShardingStrategy.HYBRID_SHARD,
    (2, True): ShardingStrategy._HYBRID_SHARD_ZERO2,
}

PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


def sharded_step(
    config: dict[str, Any],
    *,
    mesh: tuple[int, ...],
    micro_batch_size: int,
    seq_len: int,
    zero: int = 3,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    policy: torch.dtype | None = torch.bfloat16,
    reduced: torch.dtype | None = torch.float32,
    recompute: bool | str = False,
    implementation: str = "fused",
    micro_batches: int = 1,
    syncs: bool = True,
    clips: bool = False,
    rank: int = 0,
    log: bool = False,
    use_orig_params: bool = True,
    backward: str = "pre",
    ahead: bool = False,
) -> Sharded:
    """The reference step with every layer, then the model, in FSDP1. `mesh`: (ranks,) or (replicas, ranks)."""
    mode = Counting()
    mixed = None if policy is None else MixedPrecision(param_dtype=policy, reduce_dtype=reduced, buffer_dtype=policy)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ranks(prod(mesh), rank))
        for context in (Untouched(), not_traced(), cuda_kernels(), resizing(mode), warnings.catch_warnings()):
            stack.enter_context(context)
        warnings.simplefilter("ignore")
        model = build(config, attention, dtype)
        if recompute:
            model.gradient_checkpointing_enable(CHECKPOINTS["full" if recompute is True else recompute])
        units = {id(layer) for layer in layers(model)}
        how: dict[str, Any] = {}
        if len(mesh) > 1:
            how["device_mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "shards"))
        sharded = FullyShardedDataParallel(
            model,
            sharding_strategy=STRATEGIES[zero, len(mesh) > 1],
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
            mixed_precision=mixed,
            backward_prefetch=PREFETCH[backward],
            forward_prefetch=ahead,
            use_orig_params=use_orig_params,
            limit_all_gathers=True,
            device_id=torch.device("cpu"),
            **how,
        )
        optimizer = torch.optim.AdamW(sharded.parameters(), **{implementation: True})
        ids = torch.zeros((micro_batch_size, seq_len), dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        for tensor in [*batch.values(), *model.buffers(), *(h.flat_param for h in handles(sharded))]:
            mode.register(tensor)
        with mode:
            for i in range(3):
                mode.log = [] if log and i == 2 else None
                out = _step(mode, sharded, optimizer, batch, micro_batches, clips, syncs)
    return out


def handles(model: Any) -> list[Any]:
    return [m._handle for m in FullyShardedDataParallel.fsdp_modules(model) if m._handle is not None]


def _step(
    mode: Counting, model: Any, optimizer: Any, batch: dict[str, Any], micro_batches: int, clips: bool, syncs: bool
) -> Sharded:
    gc.collect()
    mode.sent = []
    resident = mode.now
    forward = backward = end = 0
    for i in range(micro_batches):
        waits = not syncs and i < micro_batches - 1
        with model.no_sync() if waits else contextlib.nullcontext():
            mode.phase = "forward"
            for handle in handles(model):  # as the root's forward does before anything else
                handle._reset_flat_param_grad_info_if_needed()
            mode.begin()
            mode.loss = model(**batch).loss
            gc.collect()
            forward, end = max(forward, mode.highest), mode.now
            mode.phase = "backward"
            mode.begin()
            mode.loss.backward()
            backward = max(backward, mode.highest)
    mode.begin()
    mode.phase = "step"
    if clips:
        model.clip_grad_norm_(1.0)
    gradients = sum(
        h.flat_param.grad.untyped_storage().nbytes() for h in handles(model) if h.flat_param.grad is not None
    )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    states = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    parameters = sum(h.flat_param.untyped_storage().nbytes() for h in handles(model))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return Sharded(resident, parameters, states, gradients, end, forward, backward, mode.highest, mode.sent, shapes)
