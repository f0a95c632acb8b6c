"""What DeepSpeed really allocates and sends: its own engine around transformers' model on CPU tensors, any rank of a
`fake` process group of any size.

DeepSpeed asks an accelerator object what the device is like. `like_cuda` is its CPU accelerator with CUDA's answers: there
are streams, which do nothing here, so the branches are those of a GPU. Its FusedAdam is DeepSpeed's own with the CUDA
kernel left out: the kernel allocates nothing. Nothing is compiled.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", "0")

import torch
import torch.distributed as dist
from gloo import join, leave
from oracle import LiveBytes, balanced_routing, build, checkpoint_first
from per_op import CHECKPOINTS
from records import on_record
from torch.testing._internal.distributed.fake_pg import FakeStore

from memcalc.validate.auto_ep import auto_ep_of_a_gpu
from memcalc.validate.deepspeed import like_cuda
from memcalc.validate.ulysses import part_of_batch, shared_loss, shared_sequences
from memcalc.validate.zero3_order import sets_in_order

Sent = Counter[tuple[str, str, int]]
"""(collective, dtype, elements of the full tensor) -> calls."""
Exchanged = Counter[tuple[str, str, str, int]]
"""The same by phase, of the ranks that share a sequence."""


OPTIONS = {
    "reduce_bucket_size": "reduce_bucket_size",
    "sub_group_size": "sub_group_size",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
}
"""Ours, and DeepSpeed's own names."""
PRECISIONS = {"fp32": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}
SIZES = {
    "bfloat16": ("bf16", 2),
    "float16": ("fp16", 2),
    "float32": ("fp32", 4),
    "float64": ("fp64", 8),
    "uint8": ("uint8", 1),
    "int32": ("int32", 4),
    "int64": ("int64", 8),
}


ByGroup = Counter[tuple[str, str, int, int]]
"""The same with the ranks of the group."""


class RankMode(LiveBytes):
    """Live bytes of one rank, and what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = Counter()
        self.group_sizes: set[int] = set()
        self.by_group: ByGroup = Counter()
        self.sequence_group: Any = None
        """The ranks that share a sequence."""
        self.phase = ""
        self.exchanged: Exchanged = Counter()

    def begin(self, phase: str = "") -> None:
        super().begin()
        self.phase = phase

    def register(self, tensor: torch.Tensor) -> int:
        return 0 if tensor.device.type == "meta" else super().register(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._collective(func._schema.name.removeprefix("c10d::"), args)
        if func.namespace == "deepspeed":  # an op with its collective inside
            assert func._schema.name == "deepspeed::dim_zero_all_to_all"
            assert args[1] == self.sequence_group.group_name
            self._exchange("all_to_all", args[:1])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _collective(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "barrier":
            return
        kind, whole = {
            "allreduce_": ("all_reduce", lambda: args[0]),
            "_allgather_base_": ("all_gather", lambda: [args[0]]),
            "_reduce_scatter_base_": ("reduce_scatter", lambda: [args[1]]),
            "broadcast_": ("broadcast", lambda: args[0]),
            "alltoall_base_": ("all_to_all", lambda: [args[1]]),
            "allgather_": ("all_gather", lambda: args[0][0]),
            "reduce_scatter_": ("reduce_scatter", lambda: args[1][0]),
        }[name]
        groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
        group = dist.ProcessGroup.unbox(groups[0])
        if self.sequence_group is not None and group.group_name == self.sequence_group.group_name:
            self._exchange(kind, whole())
            return
        dtype, elements = _size(whole())
        self.sent[kind, dtype, elements] += 1
        self.group_sizes.add(group.size())
        self.by_group[kind, dtype, elements, group.size()] += 1

    def _exchange(self, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        self.exchanged[self.phase, kind, *_size(tensors)] += 1


def _size(tensors: Sequence[torch.Tensor]) -> tuple[str, int]:
    return str(tensors[0].dtype).removeprefix("torch."), sum(t.numel() for t in tensors)


@dataclass
class Ranked:
    """Bytes of a steady step on one rank, and what it sent."""

    resident: int
    forward_end: int
    forward: int
    backward: int
    step: int
    sent: Sent
    group_sizes: set[int]
    exchanged: Exchanged
    log: list[tuple[str, int, tuple[int, ...]]]
    by_group: ByGroup
    flops: dict[str, int]


@contextlib.contextmanager
def ranks(count: int, rank: int = 0, store: str = "") -> Iterator[None]:
    """This process is one of `count` ranks, on a device like CUDA; with a file to meet in, of a real gloo group."""
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.ops.adam import fused_adam
    from deepspeed.utils import groups

    if store:
        join(count, rank, store)
    else:
        dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    own, record_stream, builder = get_accelerator(), torch.Tensor.record_stream, fused_adam.FusedAdamBuilder
    linear = torch.nn.functional.linear  # ZeRO-3 puts its own there for good
    accelerator = like_cuda()
    set_accelerator(accelerator)
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    fused_adam.FusedAdamBuilder = lambda: accelerator.create_op_builder("FusedAdamBuilder")
    try:
        with sets_in_order():
            yield
    finally:
        torch.nn.functional.linear = linear
        fused_adam.FusedAdamBuilder = builder
        torch.Tensor.record_stream = record_stream  # type: ignore[method-assign]
        set_accelerator(own)
        leave() if store else dist.destroy_process_group()
        comm.comm.cdb = None
        for name, value in vars(groups).items():
            if name.startswith("_") and name.endswith("GROUP"):
                setattr(groups, name, {} if isinstance(value, dict) else None)


def configuration(
    zero: int, precision: str, micro_batches: int, clipping: float, options: dict[str, int], ep: int = 1
) -> dict[str, Any]:
    """The ds_config. Of `options` the names are DeepSpeed's own, those of stage 3 with their prefix."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": zero, **options},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": 10**9,
    }
    if ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": ep}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":  # a loss scale of 2 overflows nothing, so no step is skipped
        config["fp16"] = {"enabled": True, "initial_scale_power": 1}
    return config


@on_record
def deepspeed_step(
    config: dict[str, Any],
    *,
    gpus: int,
    zero: int,
    cp: int = 1,
    rank: int = 0,
    precision: str = "bf16",
    micro_batch_size: int = 1,
    seq_len: int = 16,
    micro_batches: int = 1,
    clipping: float = 0.0,
    recompute: bool | str = False,
    recompute_layers: int | None = None,
    steps: int = 3,
    store: str = "",
    log: bool = False,
    ep: int = 1,
    balanced: bool = False,
    group_size: int | None = None,
    **options: int,
) -> Ranked:
    """`engine(...)`, `engine.backward`, `engine.step`, `steps` times; the last is reported. ZeRO-3 records what is used in
    what order in its second forward, so the third step is the first steady one. `ep`: of AutoEP, with even routing;
    `balanced`: even routing without it. `group_size`: of experts' weights, in elements."""
    import deepspeed

    mode = RankMode()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ranks(gpus, rank, store))
        stack.enter_context(_expert_parallel(ep, group_size))
        if balanced:
            stack.enter_context(balanced_routing())
        model = build(config, "sdpa", torch.float32)  # DeepSpeed casts it, buffers too
        if recompute:
            model.gradient_checkpointing_enable(CHECKPOINTS["full" if recompute is True else recompute])
        checkpoint_first(model, recompute_layers)
        mpu = stack.enter_context(shared_sequences(model, cp, micro_batch_size))
        mode.sequence_group = None if mpu is None else mpu.get_sequence_parallel_group()
        buffers = list(model.buffers())
        ids = torch.zeros((micro_batch_size, seq_len), dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        if mpu is not None:
            batch = part_of_batch(micro_batch_size, seq_len, cp, rank % cp)

        def loss_of(engine: Any) -> torch.Tensor:
            return engine(**batch).loss if mpu is None else shared_loss(engine, batch, cp)

        with mode:
            for tensor in [*batch.values(), *model.parameters(), *buffers]:
                mode.register(tensor)
            del buffers, tensor  # those of a block that AutoEP replaces go with it
            engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=model.parameters(),
                config=configuration(zero, precision, micro_batches, clipping, options, ep),
                mpu=mpu,
            )
            result = None
            for turn in range(steps):
                mode.log = [] if log and turn == steps - 1 else None
                result = _step(mode, engine, loss_of, micro_batches)
        engine.destroy()
    assert result is not None
    return result


@contextlib.contextmanager
def _expert_parallel(ep: int, group_size: int | None) -> Iterator[None]:
    if ep == 1:
        yield
        return
    from deepspeed.moe import utils

    split = utils.split_params_into_different_moe_groups_for_optimizer
    groups = contextlib.nullcontext() if group_size is None else patch.object(split, "__defaults__", (group_size,))
    with auto_ep_of_a_gpu(), balanced_routing(), groups:
        yield


def sent(ranked: Ranked) -> dict[tuple[str, str], tuple[int, int]]:
    """(collective, dtype) -> calls and bytes of the full tensors."""
    calls: Counter[tuple[str, str]] = Counter()
    payload: Counter[tuple[str, str]] = Counter()
    for (collective, name, elements), count in ranked.sent.items():
        dtype, itemsize = SIZES[name]
        calls[collective, dtype] += count
        payload[collective, dtype] += count * elements * itemsize
    return {key: (calls[key], payload[key]) for key in calls}


def _step(mode: RankMode, engine: Any, loss_of: Callable[[Any], torch.Tensor], micro_batches: int) -> Ranked:
    gc.collect()
    mode.sent, mode.by_group, mode.group_sizes, mode.exchanged = Counter(), Counter(), set(), Counter()
    mode.flops.clear()
    resident = mode.now
    forward = backward = step = end = 0
    for _ in range(micro_batches):
        mode.begin("forward")
        engine.held_loss = loss_of(engine)
        gc.collect()
        forward, end = max(forward, mode.highest), mode.now
        mode.begin("backward")
        engine.backward(engine.held_loss)
        backward = max(backward, mode.highest)
        mode.begin("step")
        engine.step()
        step = mode.highest  # of the last one, which is the step: the others do nothing
    return Ranked(
        resident,
        end,
        forward,
        backward,
        step,
        mode.sent,
        mode.group_sizes,
        mode.exchanged,
        mode.log or [],
        mode.by_group,
        mode.counted,
    )
