"""What FSDP2 really allocates and sends: transformers' model, `fully_shard`, autograd and AdamW under fake tensors, rank 0
of a `fake` process group of any size.

FSDP2 frees gathered parameters by resizing their storages, which a dispatch mode does not see; so its two functions for
that are wrapped. CPU tensors have no streams, so nothing waits for another stream's event: lives are those of the objects.

With tensor or expert parallelism transformers' own plan is applied first, as `from_pretrained(distributed_config=...)` does
it; and tensors are real, because the waits of functional collectives give fake tensors storages that they do not have.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from dtensor_plans import column_and_row_parallel, sequence_and_loss_parallel, sequence_parallel
from gloo import join, leave
from oracle import LiveBytes, build, checkpoint_first, cuda_kernels, not_traced
from per_op import CHECKPOINTS
from records import on_record
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from memcalc.validate.experts import even_routing, share_experts

Sent = tuple[str, int, int]
"""A collective's name, the bytes of the full tensor, and its group's size."""


Split = tuple[str, str, int]
"""Of a collective over the tensor- or expert-parallel group: the phase, its name, the bytes of the full tensor."""


class RankMode(LiveBytes):
    """Live bytes of one rank, resized storages included, and what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        self.split: list[Split] = []
        self.phase = ""
        self.tensor_parallel_group = ""
        self.expert_parallel_group = ""
        self.loss: Any = None
        """Of the last micro-batch: the caller holds it until the next one has its own."""

    def resize(self, tensor: torch.Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        more = nbytes - storage.nbytes()
        if more:
            storage.resize_(nbytes)
            if storage._cdata in self._seen:
                self.now += more
                self.highest = max(self.highest, self.now)

    def register(self, tensor: torch.Tensor) -> int:
        if tensor.device.type == "meta" or isinstance(tensor, AsyncCollectiveTensor):
            return 0  # a shape alone; a wrapper of what is already known
        return super().register(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented  # the ops over its local tensor come here by themselves
        if func.namespace == "_c10d_functional":
            self._functional(func._schema.name.removeprefix("_c10d_functional::"), args)
        elif func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            if name == "allreduce_" and _group(args).group_name == self.tensor_parallel_group:
                self.split.append((self.phase, "all_reduce", sum(t.nbytes for t in args[0])))
            elif name == "alltoall_base_":
                self.split.append((self.phase, "all_to_all", args[1].nbytes))
            elif name == "_allgather_base_":
                self.sent.append(("all_gather", args[0].nbytes, _ranks(args)))
            elif name == "_reduce_scatter_base_":
                self.sent.append(("reduce_scatter", args[1].nbytes, _ranks(args)))
            elif name == "allreduce_":
                self.sent.append(("all_reduce", sum(t.nbytes for t in args[0]), _ranks(args)))
            else:
                raise AssertionError(f"{name} is not counted")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _functional(self, name: str, args: tuple[Any, ...]) -> None:
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            return
        if name == "all_to_all_single":
            assert args[-1] == self.expert_parallel_group
            self.split.append((self.phase, "all_to_all", args[0].nbytes))
            return
        if self.phase == "step":  # norms, over all axes in turn
            assert name == "all_reduce"
            self.sent.append((name, args[0].nbytes, dist.distributed_c10d._resolve_process_group(args[-1]).size()))
            return
        assert args[-1] == self.tensor_parallel_group
        if name == "all_gather_into_tensor":
            self.split.append((self.phase, "all_gather", args[0].nbytes * args[1]))
        elif name == "all_reduce":
            self.split.append((self.phase, "all_reduce", args[0].nbytes))
        elif name == "reduce_scatter_tensor":
            self.split.append((self.phase, "reduce_scatter", args[0].nbytes))
        else:
            raise AssertionError(f"{name} is not counted")


def _ranks(args: tuple[Any, ...]) -> int:
    return _group(args).size()


def _group(args: tuple[Any, ...]) -> Any:
    groups = [
        dist.ProcessGroup.unbox(a)
        for a in args
        if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
    ]
    return groups[0]


@contextlib.contextmanager
def ranks(count: int, rank: int = 0, store: str = "") -> Iterator[None]:
    """This process is one of `count` ranks; with a file to meet in, of a real gloo group."""
    if store:
        join(count, rank, store)
    else:
        dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        leave() if store else dist.destroy_process_group()
        # What DTensor remembers of a mesh names groups that are gone, and an equal mesh's groups are called otherwise.
        _clear_sharding_prop_cache()


@contextlib.contextmanager
def resizing(mode: RankMode) -> Iterator[None]:
    """FSDP2's storages are resized under the eyes of `mode`."""
    own = _fsdp_param.alloc_storage, _fsdp_param.free_storage

    def alloc_storage(tensor: torch.Tensor) -> None:
        mode.resize(tensor, tensor.numel() * tensor.itemsize)

    _fsdp_param.alloc_storage = _fsdp_param_group.alloc_storage = alloc_storage
    _fsdp_param.free_storage = lambda tensor: mode.resize(tensor, 0)
    try:
        yield
    finally:
        _fsdp_param.alloc_storage, _fsdp_param.free_storage = own
        _fsdp_param_group.alloc_storage = own[0]


@dataclass
class Sharded:
    """Bytes of the second step on one rank, and what it sent."""

    resident: int
    forward_end: int
    forward: int
    backward: int
    step: int
    sent: list[Sent]
    split: list[Split]
    shapes: dict[str, tuple[int, ...]]
    """Of the parameters that the rank holds."""
    log: list[tuple[str, int, tuple[int, ...]]] | None
    flops: dict[str, int]


POLICIES = {
    torch.bfloat16: MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    torch.float16: MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
    None: MixedPrecisionPolicy(),
}


@on_record
def sharded_step(
    config: dict[str, Any],
    *,
    mesh: tuple[int, ...],
    micro_batch_size: int,
    seq_len: int,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    policy: torch.dtype | None = torch.bfloat16,
    reshards: bool | None = None,
    recompute: bool | str = False,
    implementation: str = "foreach",
    micro_batches: int = 1,
    syncs: bool = True,
    reduced: torch.dtype | None = None,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    busiest: int = 1,
    plan: str = "transformers",
    clips: bool = False,
    log: bool = False,
    rank: int = 0,
    store: str = "",
    recompute_layers: int | None = None,
) -> Sharded:
    """The reference step with every layer, then the model, under `fully_shard`. `mesh`: (ranks,) or (replicas, ranks).

    Without `syncs` gradients of all but the last micro-batch are added up whole, as accelerate's `no_sync` has it. With
    `store` over real tensors, and what is sent arrives."""
    mode = RankMode()
    count = prod(mesh) * tensor_parallel
    chosen = POLICIES[policy] if reduced is None else MixedPrecisionPolicy(param_dtype=policy, reduce_dtype=reduced)
    names = ("dp_replicate", "dp_shard")[-len(mesh) :]
    with contextlib.ExitStack() as stack:
        stack.enter_context(ranks(count, rank, store))
        if tensor_parallel == 1:
            whole = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        else:
            whole = init_device_mesh("cpu", (*mesh, tensor_parallel), mesh_dim_names=(*names, "tp"))
        how: dict[str, Any] = {"mesh": whole if tensor_parallel == 1 else whole[names], "mp_policy": chosen}
        if tensor_parallel == 1 and expert_parallel == 1 and not store:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for context in (not_traced(), cuda_kernels(), resizing(mode)):
            stack.enter_context(context)
        model = build(config, attention, dtype)
        if tensor_parallel > 1:
            mode.tensor_parallel_group = whole["tp"].get_group().group_name
        if expert_parallel > 1:
            stack.enter_context(even_routing(busiest))
            replicas, shards = (1, *mesh)[-2:]
            degrees = degrees_of(shards, tensor_parallel, expert_parallel, replicas)
            if tensor_parallel > 1:
                split(model, whole["tp"], degrees)
            tp = whole["tp"] if tensor_parallel > 1 else None
            group = share_experts(model, "cpu", degrees, tp, **how | {"reshard_after_forward": reshards})
            mode.expert_parallel_group = group.get_group().group_name
        elif tensor_parallel > 1:
            PLANS[plan](model, whole["tp"])
        if recompute:
            model.gradient_checkpointing_enable(CHECKPOINTS["full" if recompute is True else recompute])
        checkpoint_first(model, recompute_layers)
        for layer in layers(model):
            fully_shard(layer, reshard_after_forward=reshards, **how)
        fully_shard(model, reshard_after_forward=reshards, **how)
        by_mesh: dict[DeviceMesh, list[torch.nn.Parameter]] = {}
        for parameter in model.parameters():
            by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
        # Parameters on different meshes cannot share a kernel: Trainer.create_optimizer makes groups of them.
        groups = [{"params": parameters} for parameters in by_mesh.values()]
        optimizer = torch.optim.AdamW(groups, **{implementation: True})
        ids = torch.zeros((micro_batch_size, seq_len), dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        if plan in ("sequence parallel", "loss parallel"):  # transformers would count the tokens of a shard
            batch["position_ids"] = torch.arange(seq_len).unsqueeze(0)
        for tensor in [*batch.values(), *model.buffers(), *(p._local_tensor for p in model.parameters())]:
            mode.register(tensor)
        if plan == "loss parallel":
            stack.enter_context(loss_parallel())
        with mode:
            for _ in range(2):
                mode.log = [] if log else None
                out = _step(mode, model, optimizer, batch, micro_batches, clips, syncs)
    return out


PLANS: dict[str, Callable[[Any, DeviceMesh], None]] = {}


def degrees_of(shards: int, tensor_parallel: int, expert_parallel: int = 1, replicas: int = 1) -> Any:
    """transformers' own of these degrees."""
    from transformers.distributed import DistributedConfig

    return DistributedConfig(
        fsdp_size=shards, tp_size=tensor_parallel, ep_size=expert_parallel, dp_replicate_size=replicas
    )


def split(model: Any, mesh: DeviceMesh, degrees: Any = None) -> None:
    """transformers' `tp_plan="auto"` over a mesh (distributed/mixin.py, maybe_distribute_model)."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, _, _ = model._resolve_parallel_plans(degrees or degrees_of(1, mesh.size()))
    own, tied = dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))
    again = [name for name in plan if name in tied and name not in own]
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name not in again})
    if again:  # weights are tied once they are split
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


PLANS |= {
    "transformers": split,
    "dtensor": column_and_row_parallel,
    "sequence parallel": sequence_parallel,
    "loss parallel": sequence_and_loss_parallel,
}


def layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Some types have no GradientCheckpointingLayer, but one list of layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    marked = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return marked or list(next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList)))


def _step(
    mode: RankMode,
    model: Any,
    optimizer: Any,
    batch: dict[str, torch.Tensor],
    micro_batches: int,
    clips: bool,
    syncs: bool,
) -> Sharded:
    gc.collect()
    mode.sent, mode.split = [], []
    mode.flops.clear()
    resident = mode.now
    forward = backward = end = 0
    for i in range(micro_batches):
        model.set_requires_gradient_sync(syncs or i == micro_batches - 1)
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
    if clips:
        mode.phase = "step"
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    shapes = {name: tuple(p._local_tensor.shape) for name, p in model.named_parameters()}
    return Sharded(
        resident, end, forward, backward, mode.highest, mode.sent, mode.split, shapes, mode.log, mode.counted
    )
