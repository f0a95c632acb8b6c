"""What torch's context parallelism allocates and sends beside FSDP2: transformers' model under `fully_shard` over dp·cp, a
step in `context_parallel`, any rank of a `fake` process group, real tensors on the CPU.

As transformers' Trainer and accelerate do it: the batch is input_ids, labels, shift_labels and position_ids, which are
sharded in place, and attention gets no mask.
"""

from __future__ import annotations

import contextlib
import gc
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fsdp2_oracle import PLANS, POLICIES, RankMode, Sent, Split, layers, resizing
from oracle import build
from per_op import CHECKPOINTS
from records import on_record
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from memcalc.validate.attention_kernels import as_on_cuda
from memcalc.validate.context_parallel import joined, refill, shared_sequence, whole_sequences, without_masks
from memcalc.validate.live import STATE


class RingMode(RankMode):
    """Counts what goes over the context-parallel group apart."""

    def __init__(self) -> None:
        super().__init__()
        self.ring: list[Split] = []
        self.ring_group: Any = None

    def leave_out(self, tensor: torch.Tensor) -> None:
        """A tensor that is the CPU's on a GPU too, as that of a mesh's ranks is."""
        self._seen.add(tensor.untyped_storage()._cdata)

    def register(self, tensor: torch.Tensor) -> int:
        return 0 if tensor.dtype is STATE else super().register(tensor)

    def _functional(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in ("all_gather_into_tensor", "all_to_all_single") or not self._over_ring(args[-1]):
            super()._functional(name, args)
        elif name == "all_gather_into_tensor":
            self.ring.append((self.phase, "all_gather", args[0].nbytes * args[1]))
        else:
            assert sorted(args[2])[:-1] == [0] * (len(args[2]) - 1)  # all of it to one rank
            self.ring.append((self.phase, "send", args[0].nbytes))

    def _over_ring(self, group: Any) -> bool:
        if self.ring_group is None:
            return False
        return getattr(group, "group_name", group) == self.ring_group.group_name


class Shared(NamedTuple):
    """Bytes of the second step on one rank, and what it sent."""

    forward_end: int
    forward: int
    backward: int
    step: int
    sent: list[Sent]
    split: list[Split]
    ring: list[Split]
    log: list[tuple[str, int, tuple[int, ...]]] | None
    flops: dict[str, int]


@on_record
def shared_step(
    config: dict[str, Any],
    *,
    mesh: tuple[int, ...],
    context_parallel: int,
    micro_batch_size: int,
    seq_len: int,
    rank: int = 0,
    rotate: str = "allgather",
    dtype: torch.dtype = torch.float32,
    policy: torch.dtype | None = torch.bfloat16,
    reshards: bool | None = None,
    recompute: bool | str = False,
    micro_batches: int = 1,
    syncs: bool = True,
    reduced: torch.dtype | None = None,
    tensor_parallel: int = 1,
    plan: str = "transformers",
    log: bool = False,
) -> Shared:
    """`mesh`: (ranks,) or (replicas, ranks), of which each is `context_parallel` times `tensor_parallel` GPUs.

    `rank`: of the context-parallel group. `syncs`: as in fsdp2_oracle.
    """
    mode = RingMode()
    policy_of = POLICIES[policy]
    if reduced is not None:
        policy_of = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=policy, reduce_dtype=reduced)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_one_rank(rank * tensor_parallel, prod(mesh) * context_parallel * tensor_parallel))
        for context in (as_on_cuda(), resizing(mode)):
            stack.enter_context(context)
        whole, shards = _meshes(mesh, context_parallel, tensor_parallel)
        mode.ring_group = whole["cp"].get_group()
        model = build(config, "sdpa", dtype)
        if tensor_parallel > 1:
            PLANS[plan](model, whole["tp"])
            mode.tensor_parallel_group = whole["tp"].get_group().group_name
        if recompute:
            model.gradient_checkpointing_enable(CHECKPOINTS["full" if recompute is True else recompute])
        without_masks(model)
        for layer in layers(model):
            fully_shard(layer, reshard_after_forward=reshards, mesh=shards, mp_policy=policy_of)
        fully_shard(model, reshard_after_forward=reshards, mesh=shards, mp_policy=policy_of)
        by_mesh: dict[DeviceMesh, list[torch.nn.Parameter]] = {}
        for parameter in model.parameters():
            by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
        optimizer = torch.optim.AdamW([{"params": own} for own in by_mesh.values()], fused=True)
        shape = (micro_batch_size, seq_len)
        batch = whole_sequences(shape)
        for tensor in [*batch.values(), *model.buffers(), *(p._local_tensor for p in model.parameters())]:
            mode.register(tensor)
        mode.leave_out(whole._rank_map)
        with mode:
            for _ in range(2):
                mode.log = [] if log else None
                out = _step(mode, model, optimizer, batch, shape, whole["cp"], rotate, micro_batches, syncs)
    return out


@contextlib.contextmanager
def _one_rank(rank: int, count: int) -> Any:
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        for forget in (_clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache):
            forget()  # it has the meshes of this rank, which equal those of another one


def _meshes(mesh: tuple[int, ...], context_parallel: int, tensor_parallel: int) -> tuple[DeviceMesh, DeviceMesh]:
    """All of it, and what is sharded over."""
    names = ("dp_replicate", "dp_shard")[-len(mesh) :]
    sizes, axes = (*mesh, context_parallel, tensor_parallel), (*names, "cp", "tp")
    whole = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    return whole, joined(whole)


def _step(
    mode: RingMode,
    model: Any,
    optimizer: Any,
    batch: dict[str, torch.Tensor],
    shape: tuple[int, int],
    ring: DeviceMesh,
    rotate: str,
    micro_batches: int,
    syncs: bool,
) -> Shared:
    gc.collect()
    mode.sent, mode.split, mode.ring = [], [], []
    mode.flops.clear()
    forward = backward = end = 0
    for i in range(micro_batches):
        model.set_requires_gradient_sync(syncs or i == micro_batches - 1)
        refill(batch, shape)
        with shared_sequence(ring, batch, rotate):
            mode.phase = "forward"
            mode.begin()
            mode.loss = model(**batch).loss
            gc.collect()
            forward, end = max(forward, mode.highest), mode.now
            mode.phase = "backward"
            mode.begin()
            mode.loss.backward()
            backward = max(backward, mode.highest)
    mode.begin()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Shared(end, forward, backward, mode.highest, mode.sent, mode.split, mode.ring, mode.log, mode.counted)
