# pyright: basic
"""The module under its engine: DistributedDataParallel, or `fully_shard` over every layer and then the model."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel

from memcalc.setup.setup import DTYPES as BY_NAME
from memcalc.validate.context_parallel import ROTATES, joined, micro_batch, without_masks
from memcalc.validate.dtypes import DTYPES
from memcalc.validate.experts import share_experts
from memcalc.validate.optimizers import by_mesh, make, make_optimizer
from memcalc.validate.plans import sequence_and_loss_parallel, sequence_parallel
from memcalc.validate.reference import Around, Job, of_rank, plain_step
from memcalc.validate.versions import refuse_older

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup
    from memcalc.validate.live import Live


def wrapped(setup: Setup, module: Any, batch: dict[str, torch.Tensor], mesh: Any, live: Live | None) -> Job:
    """Return a job of the setup's engine. `mesh` is FSDP2's, made before any mode for fake tensors; `live` is told of
    DDP's buckets."""
    if setup.engine == "fsdp2":
        return _fsdp2(setup, module, batch, mesh)
    if setup.engine == "ddp":
        return _ddp(setup, module, batch, live)
    return _job(setup, module, module, make_optimizer(setup, module), batch)


def _job(
    setup: Setup, module: Any, model: Any, optimizer: Any, batch: dict[str, torch.Tensor], around: Around | None = None
) -> Job:
    step = plain_step(setup, model, optimizer, batch, around or (lambda follows: contextlib.nullcontext()))
    return Job([module], optimizer, batch, step)


def _ddp(setup: Setup, module: Any, batch: dict[str, torch.Tensor], live: Live | None) -> Job:
    model, held_back = replicated(setup, module, live)
    return _job(setup, module, model, make_optimizer(setup, module), batch, held_back)


def replicated(setup: Setup, module: Any, live: Live | None) -> tuple[Any, Around]:
    """Return the module in DDP, and the context of its micro-batches."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(module)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations, and refuses ones that are strings
        """Reduce a bucket as the reducer itself does. With a fake group the reducer would wait for a result that never
        comes. Its buckets are made in C++, which a dispatch mode does not see."""
        buffer = bucket.buffer()
        if live is not None:
            live.register(buffer)
        work: Any = torch.distributed.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda _: buffer)

    def held_back(follows: bool) -> Any:
        """Delay the reduction of a micro-batch while others follow."""
        waits = follows and not setup.sync_each_micro_batch
        return model.no_sync() if waits else contextlib.nullcontext()

    if torch.distributed.get_backend() == "fake":
        model.register_comm_hook(None, hook)
    return model, held_back


def mesh_of(setup: Setup, device: str) -> Any:
    """Return FSDP2's mesh: stages, replicas, shards, parts of a sequence and tensor parallelism, as far as the setup
    has them."""
    sizes = {
        "pp": setup.pp, "dp_replicate": setup.replicas, "dp_shard": setup.shards // setup.cp, "cp": setup.cp, "tp": setup.tp,
    }  # fmt: skip
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "dp_shard")
    return init_device_mesh(device, tuple(sizes[name] for name in names), mesh_dim_names=names)


def shard(setup: Setup, module: Any, whole: Any, device: torch.device) -> None:
    """Run `fully_shard` over every layer and then the module. A module on the meta device is moved to `device`."""
    over = tuple(name for name in whole.mesh_dim_names if name not in ("pp", "tp"))
    mesh = whole if over == whole.mesh_dim_names else whole[over]
    policy = MixedPrecisionPolicy()
    if setup.has_master_weights:
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[setup.compute_dtype], reduce_dtype=DTYPES[BY_NAME[setup.grad_dtype]]
        )
    how: dict[str, Any] = {
        "mesh": joined(whole) if setup.shares_sequences else mesh, "mp_policy": policy,
        "reshard_after_forward": None if setup.zero == 3 else False,
    }  # fmt: skip
    if setup.ep > 1:
        share_experts(module, device.type, config_of(setup), whole["tp"] if setup.tp > 1 else None, **how)
    for layer in _layers(module):
        fully_shard(layer, **how)
    fully_shard(module, **how)
    if next(module.parameters()).is_meta:
        _materialize(module, device)


def _layers(module: Any) -> list[Any]:
    """Return the layers of the module's stacks: those that transformers can checkpoint or, if it cannot checkpoint the
    type, those in lists."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]
    return found or [layer for stack in lists for layer in stack]


def _fsdp2(setup: Setup, module: Any, batch: dict[str, torch.Tensor], whole: Any) -> Job:
    device = next(iter(batch.values())).device
    if setup.sequence_parallel:  # transformers would count the tokens of a shard
        tokens = batch["input_ids"]
        batch = {"position_ids": torch.arange(tokens.shape[1], device=device).unsqueeze(0)} | batch
    split(setup, module, whole)
    around = _sharing(setup, module, batch, whole) if setup.shares_sequences else None
    if setup.keeps_whole_gradients:
        around = _reducing_last(module, around)
    shard(setup, module, whole, device)
    optimizer = make(setup, by_mesh(p for p in module.parameters() if p.requires_grad))
    job = _job(setup, module, module, optimizer, batch, around)
    return job._replace(step=under_loss_parallel(job.step)) if split_logits(setup) else job


def split(setup: Setup, module: Any, whole: Any) -> Any:
    """Return the module with tensor parallelism over the mesh's tp, if there is any: by torch's plan or
    transformers'."""
    if setup.sequence_parallel:
        (sequence_and_loss_parallel if split_logits(setup) else sequence_parallel)(module, whole["tp"])
    elif setup.tp > 1:
        _split(setup, module, whole["tp"])
    return module


def _sharing(setup: Setup, module: Any, batch: dict[str, torch.Tensor], whole: Any) -> Around:
    """Return the context of micro-batches whose ranks share sequences."""
    ring, shape = whole["cp"], (setup.micro_batch_size, setup.seq_len or 1)
    rotate = ROTATES[setup.cp_comm_type or "all_gather"]
    without_masks(module)
    return lambda follows: micro_batch(ring, batch, shape, rotate)


def _reducing_last(module: Any, around: Around | None) -> Around:
    """Return the context of micro-batches as in accelerate's `no_sync` for FSDP2."""

    def micro_batch(follows: bool) -> Any:
        module.set_requires_gradient_sync(not follows)
        return contextlib.nullcontext() if around is None else around(follows)

    return micro_batch


def split_logits(setup: Setup) -> bool:
    return setup.cross_entropy == "vocab-parallel"


def under_loss_parallel(step: Any) -> Any:
    def call(enter: Any) -> int:
        with loss_parallel():
            return step(enter)

    return call


def _materialize(module: Any, device: torch.device) -> None:
    """Allocate the module's tensors on `device`. Their values change no size."""
    module.to_empty(device=device)
    for tensor in (*module.parameters(), *module.buffers()):
        of_rank(tensor).data.zero_()


def config_of(setup: Setup) -> Any:
    """Return transformers' configuration of the setup's degrees. Raises InputError if this version does not know all of
    them."""
    from transformers.distributed.configuration_utils import DistributedConfig

    degrees: dict[str, Any] = {
        "dp_replicate_size": setup.replicas, "fsdp_size": setup.shards, "tp_size": setup.tp, "ep_size": setup.ep,
    }  # fmt: skip
    try:
        return DistributedConfig(**degrees)
    except TypeError:
        refuse_older("tp", setup.tp)


def _split(setup: Setup, module: Any, mesh: Any) -> None:
    """Apply transformers' `tp_plan="auto"` over a mesh (distributed/mixin.py, maybe_distribute_model)."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = config_of(setup)
    plan, _, _ = module._resolve_parallel_plans(config)
    own, tied = dict(module.named_parameters()), dict(module.named_parameters(remove_duplicate=False))
    again = [name for name in plan if name in tied and name not in own]
    apply_tensor_parallelism(module, mesh, {name: style for name, style in plan.items() if name not in again})
    if again:  # weights are tied once they are split
        module.get_output_embeddings().weight = module.get_input_embeddings().weight
