"""What one rank of torch.distributed.pipelining really allocates and sends: transformers' model cut into stages, each under
`fully_shard`, PipelineStage and a schedule, autograd and AdamW under fake tensors, as rank of a `fake` process group.

A stage is a copy of the model without the layers of the others: its forward is transformers' own, given the hidden states as
`inputs_embeds`; the last stage's is that of the whole model. Nothing arrives over a fake group, so the shapes that stages
agree upon before their first step are given to them.

With tensor parallelism the plan comes before `fully_shard`, as torchtitan has it, and tensors are real (`fsdp2_oracle`).

With context parallelism a step of the schedule is in torch's `context_parallel`, as torchtitan's trainer has it, over the ids
of the first stage, the shifted labels of the last one and the positions that every stage is given, which alone are restored;
attention gets no mask, as accelerate has it. Units are sharded over dp and cp; tensors are real.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from context_parallel_oracle import RingMode
from fsdp2_oracle import PLANS, POLICIES, Sent, Split, layers, resizing
from oracle import build, cuda_kernels, not_traced
from per_op import CHECKPOINTS
from records import on_record
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from memcalc.validate.attention_kernels import as_on_cuda
from memcalc.validate.context_parallel import shared_tensors, without_masks

CLASSES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
}


class PipelineMode(RingMode):
    """Live bytes of one rank and what it sends, to other stages too."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[tuple[str, int]] = []
        self.labels: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            if name in ("send", "recv_"):
                self.moved.append((name.rstrip("_"), sum(t.nbytes for t in args[0])))
                return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class StageModule(torch.nn.Module):
    """Some layers of a causal language model, with the embedding before the first and the head behind the last."""

    def __init__(
        self, whole: Any, start: int, count: int, *, first: bool, last: bool, positions: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.given = {} if positions is None else {"position_ids": positions}
        model = whole.model
        model.layers = torch.nn.ModuleList(list(model.layers)[start : start + count])
        if getattr(model.config, "layer_types", None):  # which are looked up by a layer's place in the list
            model.config.layer_types = model.config.layer_types[start : start + count]
        if not first:
            model.embed_tokens = None
        if not last:
            model.norm = torch.nn.Identity()
        self.first, self.last = first, last
        self.whole = whole if last else None
        self.model = None if last else model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {"input_ids" if self.first else "inputs_embeds": x, "use_cache": False, **self.given}
        if self.whole is not None:
            return self.whole(**given).logits
        assert self.model is not None
        return self.model(**given).last_hidden_state


@dataclass
class RankStep:
    """Bytes of the second step on one rank, and what it sent."""

    resident: int
    forward: int
    backward: int
    reduced: int
    step: int
    sent: list[Sent]
    moved: list[tuple[str, int]]
    split: list[Split]
    ring: list[Split]
    norms: list[Sent]
    """What clipping sends."""
    log: list[tuple[str, int, tuple[int, ...]]] | None
    flops: dict[str, int]


@on_record
def pipeline_step(
    config: dict[str, Any],
    *,
    schedule: str,
    rank: int,
    spans: list[list[tuple[int, int]]],
    dp: int,
    replicas: int = 1,
    micro_batches: int,
    micro_batch_size: int,
    seq_len: int,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    policy: torch.dtype | None = torch.bfloat16,
    reduced: torch.dtype | None = None,
    reshards: bool | None = None,
    recompute: bool | str = False,
    implementation: str = "fused",
    tensor_parallel: int = 1,
    plan: str = "transformers",
    context_parallel: int = 1,
    ring_rank: int = 0,
    rotate: str = "allgather",
    clips: bool = False,
    log: bool = False,
) -> RankStep:
    """A step of pipeline rank `rank`; `spans`: of each rank its chunks' (first layer, layers).

    `ring_rank`: of those that share sequences.
    """
    mode = PipelineMode()
    ranks, chunks = len(spans), len(spans[0])
    chosen = POLICIES[policy] if reduced is None else MixedPrecisionPolicy(param_dtype=policy, reduce_dtype=reduced)
    sequence_parallel = plan in ("sequence parallel", "loss parallel")
    tp, cp = tensor_parallel, context_parallel
    number, count = (rank * dp * cp + ring_rank) * tp, ranks * dp * cp * tp
    dist.init_process_group("fake", rank=number, world_size=count, store=FakeStore())
    try:
        with contextlib.ExitStack() as stack:
            sizes, names = (ranks, replicas, dp // replicas, cp), ("pp", "replicas", "dp", "cp")
            over_tp = None
            if tp == 1:
                mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            else:
                # Meshes that differ by the rank alone are equal, and DTensor's caches would give this one another's groups.
                axis = f"tp of rank {rank} of {sizes}"
                mesh = init_device_mesh("cpu", (*sizes, tp), mesh_dim_names=(*names, axis))
                over_tp = mesh[axis]
                mode.tensor_parallel_group = over_tp.get_group().group_name
            mode.leave_out(mesh._rank_map)
            mesh["dp", "cp"]._flatten("shards")
            if cp > 1:
                mode.ring_group = mesh["cp"].get_group()
            elif tp == 1:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            on_cuda = (as_on_cuda(),) if cp > 1 else (not_traced(), cuda_kernels())
            for context in (*on_cuda, resizing(mode)):
                stack.enter_context(context)
            total = ranks * chunks
            hidden_dtype = policy or dtype
            stages: list[Any] = []
            loss_function: Any = None
            vocab = 0
            positions = torch.arange(seq_len).unsqueeze(0) if sequence_parallel or cp > 1 else None
            for i, (start, count) in enumerate(spans[rank]):
                index = i * ranks + rank
                whole: Any = build(config, attention, dtype)
                loss_function, vocab = whole.loss_function, whole.config.vocab_size
                if over_tp is not None:
                    PLANS[plan](whole, over_tp)
                if cp > 1:
                    without_masks(whole)
                if recompute:
                    whole.gradient_checkpointing_enable(CHECKPOINTS["full" if recompute is True else recompute])
                module = StageModule(
                    whole, start, count, first=index == 0, last=index == total - 1, positions=positions
                )
                how: dict[str, Any] = {
                    "mesh": mesh["shards"] if replicas == 1 else mesh["replicas", "shards"],
                    "mp_policy": chosen,
                    "reshard_after_forward": reshards,
                }
                for layer in layers(module):
                    fully_shard(layer, **how)
                fully_shard(module, **how)
                own = seq_len // cp
                part = own // tp if sequence_parallel else own
                hidden = torch.empty(
                    micro_batch_size, part, whole.config.hidden_size, dtype=hidden_dtype, device="meta"
                ).requires_grad_()
                ids = torch.empty(micro_batch_size, own, dtype=torch.int64, device="meta")
                logits = torch.empty(micro_batch_size, own, vocab, dtype=hidden_dtype, device="meta")
                stage = PipelineStage(
                    module,
                    index,
                    total,
                    torch.device("cpu"),
                    input_args=ids if index == 0 else hidden,
                    output_args=logits.requires_grad_() if index == total - 1 else hidden,
                    group=mesh.get_group("pp"),
                )
                stages.append(stage)
                del whole

            def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                shifted = {} if cp == 1 else {"shift_labels": target}
                return loss_function(logits=output, labels=target, vocab_size=vocab, **shifted)

            of_one = schedule in ("gpipe", "1f1b")
            running = CLASSES[schedule](stages[0] if of_one else stages, micro_batches, loss_fn=loss_of)

            def warmed_up(stages: list[Any], *rest: Any) -> None:
                for stage in stages:
                    stage._inference_mode = InferenceMode.STATIC

            running._warmup_p2p = warmed_up
            parameters = [p for stage in stages for p in stage.submod.parameters()]
            by_mesh: dict[Any, list[torch.nn.Parameter]] = {}
            for parameter in parameters:
                by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
            groups = [{"params": of_mesh} for of_mesh in by_mesh.values()]
            optimizer = torch.optim.AdamW(groups, **{implementation: True})
            whole_batch = (micro_batches * micro_batch_size, seq_len)
            batch = torch.zeros(whole_batch, dtype=torch.int64)
            buffers = [b for stage in stages for b in stage.submod.buffers()]
            for tensor in [*buffers, *(p._local_tensor for p in parameters)]:
                mode.register(tensor)
            has_first, has_last = spans[rank][0][0] == 0, stages[-1].is_last
            if has_first or has_last:
                mode.register(batch)
            if positions is not None:
                mode.register(positions)
            if plan == "loss parallel":
                stack.enter_context(loss_parallel())
            with mode:
                losses: list[torch.Tensor] = []
                watch(mode, stages)
                for _ in range(2):
                    gc.collect()
                    mode.log = [] if log else None
                    mode.sent, mode.moved, mode.split, mode.ring = [], [], [], []
                    mode.flops.clear()
                    mode.peaks = {"forward": 0, "backward": 0, "reduce": 0}
                    resident = mode.now
                    mode.phase = "forward"
                    given = (batch,) if has_first else ()
                    target = {"target": batch, "losses": losses} if has_last else {}
                    shared = contextlib.nullcontext()
                    if cp > 1:
                        cut = [batch] if has_first or has_last else []
                        for tensor in cut:
                            tensor.resize_(whole_batch)  # its storage never shrank
                        shared = shared_tensors(mesh["cp"], cut, [positions], rotate)
                    with shared:
                        mode.begin()
                        running.step(*given, return_outputs=False, **target)
                        mode.close()
                    mode.begin()
                    sent, mode.sent, mode.phase = mode.sent, [], "step"
                    if clips:
                        clip_over_stages(parameters, mesh.get_group("pp"))
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    peaks = mode.peaks
                    out = RankStep(
                        resident, peaks["forward"], peaks["backward"], peaks["reduce"], mode.highest, sent,
                        mode.moved, mode.split, mode.ring, mode.sent, mode.log, mode.counted,
                    )  # fmt: skip
    finally:
        dist.destroy_process_group()
        for forget in (_clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache):
            forget()  # it has the meshes of this rank, which equal those of another one
    return out


def clip_over_stages(parameters: list[Any], stages: Any) -> None:
    """torchtitan's clip_grad_norm_: torch's norm of what this rank has, and a sum of squares over the stages."""
    total: Any = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], 2.0)
    if isinstance(total, DTensor):
        total = total.full_tensor()
    total **= 2.0
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=stages)
    total **= 1.0 / 2.0
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, total)


def watch(mode: Any, stages: list[Any]) -> None:
    """The phases of a step: from the call of a forward to that of a backward or a reduction, and so on."""

    def close() -> None:
        mode.peaks[mode.phase] = max(mode.peaks[mode.phase], mode.highest)

    def opening(phase: str, method: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            close()
            mode.phase = phase
            mode.begin()
            return method(*args, **named)

        return call

    mode.close = close
    for stage in stages:
        stage.forward_one_chunk = opening("forward", stage.forward_one_chunk)
        stage.backward_one_chunk = opening("backward", stage.backward_one_chunk)
        stage.backward_weight_one_chunk = opening("backward", stage.backward_weight_one_chunk)
        stage.perform_reduce_grad = opening("reduce", stage.perform_reduce_grad)
