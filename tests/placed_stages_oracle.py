"""What one rank of torch.distributed.pipelining really allocates and sends where stages lie in a V or both ways, and where an
order is given to it: PipelineStages over transformers' layers under `fully_shard`, autograd and AdamW under fake tensors.

torch's ScheduleZBVZeroBubble and ScheduleDualPipeV run as they are, and its runtime runs an order of a pipeline with one stage a
rank. It has no two pipelines in one step and no update within one, so `_driven` calls the stages' own methods in such an order.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_oracle import POLICIES, layers, resizing
from oracle import build, cuda_kernels, not_traced
from pipeline_oracle import PipelineMode, RankStep, StageModule, watch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from memcalc.pipelining.actions import Action

OF_TORCH: dict[str, Any] = {"zbv": schedules.ScheduleZBVZeroBubble, "dualpipev": schedules.ScheduleDualPipeV}
_TYPES = {
    "forward": schedules.FORWARD, "backward": schedules.FULL_BACKWARD, "backward of inputs": schedules.BACKWARD_INPUT,
    "backward of weights": schedules.BACKWARD_WEIGHT,
}  # fmt: skip

Spans = Sequence[tuple[int, int]]
"""Of each of a rank's chunks the first layer and the number of layers."""
Orders = Sequence[Sequence[Action]]


def placed_step(
    config: dict[str, Any],
    *,
    schedule: str,
    rank: int,
    ranks: int,
    spans: Spans,
    stages: Sequence[int],
    of_stages: int,
    micro_batches: int,
    of_each: int,
    dp: int,
    micro_batch_size: int,
    seq_len: int,
    orders: Orders = (),
    actions: Sequence[Action] = (),
    reshards: bool | None = None,
    policy: torch.dtype | None = torch.bfloat16,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    implementation: str = "fused",
) -> RankStep:
    """A step of pipeline rank `rank`, whose chunks are the `stages` of `of_stages`. `orders`: those of all ranks for torch's
    runtime; `actions`: those of this rank if its stages are called one by one; neither of them: torch's own schedule.
    """
    mode = PipelineMode()
    dist.init_process_group("fake", rank=rank * dp, world_size=ranks * dp, store=FakeStore())
    try:
        with contextlib.ExitStack() as stack:
            mesh = init_device_mesh("cpu", (ranks, 1, dp), mesh_dim_names=("pp", "replicas", "dp"))
            mode.leave_out(mesh._rank_map)
            for context in (FakeTensorMode(allow_non_fake_inputs=True), not_traced(), cuda_kernels(), resizing(mode)):
                stack.enter_context(context)
            made: list[Any] = []
            loss_function: Any = None
            vocab = 0
            for index, (start, count) in zip(stages, spans, strict=True):
                whole: Any = build(config, attention, dtype)
                loss_function, vocab, wide = whole.loss_function, whole.config.vocab_size, whole.config.hidden_size
                first, last = index == 0, index == of_stages - 1
                module = StageModule(whole, start, count, first=first, last=last, positions=None)
                how: dict[str, Any] = {
                    "mesh": mesh["dp"], "mp_policy": POLICIES[policy], "reshard_after_forward": reshards,
                }  # fmt: skip
                for layer in layers(module):
                    fully_shard(layer, **how)
                fully_shard(module, **how)
                sizes, between = (micro_batch_size, seq_len), policy or dtype
                hidden = torch.empty(*sizes, wide, dtype=between, device="meta").requires_grad_()
                ids = torch.empty(*sizes, dtype=torch.int64, device="meta")
                logits = torch.empty(*sizes, vocab, dtype=between, device="meta").requires_grad_()
                made.append(
                    PipelineStage(
                        module, index, of_stages, torch.device("cpu"), input_args=ids if first else hidden,
                        output_args=logits if last else hidden, group=mesh.get_group("pp"),
                    )
                )  # fmt: skip
                del whole

            def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                return loss_function(logits=output, labels=target, vocab_size=vocab)

            for stage in made:
                stage._inference_mode = InferenceMode.STATIC
            parameters = [p for stage in made for p in stage.submod.parameters()]
            optimizer = torch.optim.AdamW(parameters, **{implementation: True})
            batch = torch.zeros((micro_batches * micro_batch_size, seq_len), dtype=torch.int64)
            for tensor in [
                *(b for stage in made for b in stage.submod.buffers()),
                *(p._local_tensor for p in parameters),
            ]:
                mode.register(tensor)
            has_first, has_last = any(stage.is_first for stage in made), any(stage.is_last for stage in made)
            if has_first or has_last:
                mode.register(batch)
            losses: list[torch.Tensor] = []
            running: Callable[[], None]

            def updating() -> None:
                mode.close()
                mode.phase = "update"
                mode.begin()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                mode.close()
                mode.phase = "backward"
                mode.begin()

            if actions:
                running = _driven(made, actions, of_each, batch.chunk(micro_batches), loss_of, losses, updating)
            else:
                running = _scheduled(
                    schedule,
                    made,
                    rank,
                    orders,
                    micro_batches,
                    loss_of,
                    batch,
                    losses,
                    is_first=has_first,
                    is_last=has_last,
                )
            with mode:
                watch(mode, made)
                for _ in range(2):
                    gc.collect()
                    mode.sent, mode.moved, mode.split, mode.ring = [], [], [], []
                    mode.flops.clear()
                    mode.peaks = {"forward": 0, "backward": 0, "reduce": 0, "update": 0}
                    resident = mode.now
                    mode.phase = "forward"
                    mode.begin()
                    running()
                    mode.close()
                    mode.begin()
                    sent, mode.sent, mode.phase = mode.sent, [], "step"
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    peaks = mode.peaks
                    out = RankStep(
                        resident, peaks["forward"], peaks["backward"], peaks["reduce"], max(mode.highest, peaks["update"]), sent,
                        mode.moved, mode.split, mode.ring, mode.sent, None, mode.counted,
                    )  # fmt: skip
    finally:
        dist.destroy_process_group()
    return out


def _scheduled(
    name: str, stages: list[Any], rank: int, orders: Orders, micro_batches: int, loss_of: Any, batch: torch.Tensor,
    losses: list[torch.Tensor], *, is_first: bool, is_last: bool,
) -> Callable[[], None]:  # fmt: skip
    """A step of torch's schedule, or of its runtime over the orders of all ranks."""
    made: Any
    if orders:
        made = schedules._PipelineScheduleRuntime(stages, micro_batches, loss_fn=loss_of)
        order = {
            other: [schedules._Action(other, _TYPES[kind], i) for kind, _, i in own] for other, own in enumerate(orders)
        }
        made._prepare_schedule_with_comms(order)
    else:
        made = OF_TORCH[name](stages, micro_batches, loss_fn=loss_of)
    made._warmup_p2p = lambda *_: None
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC

    def step() -> None:
        given = (batch,) if is_first else ()
        target = {"target": batch, "losses": losses} if is_last else {}
        made.step(*given, return_outputs=False, **target)

    return step


def _driven(
    stages: list[Any], actions: Sequence[Action], of_each: int, batch: Sequence[torch.Tensor], loss_of: Any,
    losses: list[torch.Tensor], updating: Callable[[], None],
) -> Callable[[], None]:  # fmt: skip
    """A step in which each action is the call that torch's runtime makes of it (_PipelineScheduleRuntime, _step_microbatches).
    An update is the optimizer's step, while micro-batches are in flight."""
    for stage in stages:
        stage._prepare_forward_infra(of_each, (batch[0],) if stage.is_first else (), {}, has_backward=True)
        stage._prepare_backward_infra(of_each)
        stage.has_backward = True

    own: dict[int, torch.Tensor] = {}
    handles: dict[int, list[Any]] = {}

    def perform(kind: str, chunk: int, i: int | None) -> None:
        """A scope of its own, as the runtime's _perform_action is: it drops what it has named."""
        stage = stages[chunk]
        modules = [m for m in stage.submod.modules() if hasattr(m, "unshard")]
        if kind == "unshard":
            handles[chunk] = [module.unshard(async_op=True) for module in modules]
        elif kind == "reshard":
            for module in modules:
                module.reshard()
        elif kind == "reduce":
            stage.perform_reduce_grad(1)
        elif kind == "update":
            updating()
        elif i is not None and kind in ("send forward", "send backward"):
            ops = stage.get_fwd_send_ops(i) if kind == "send forward" else stage.get_bwd_send_ops(i)
            for op in ops:
                op.op(op.tensor, op.peer, group=op.group)
        elif i is not None:
            for handle in handles.pop(chunk, []):
                handle.wait()
            if kind == "forward":
                output = stage.forward_one_chunk(i, (batch[i],), {}, save_forward_output=False)
                if stage.is_last:
                    own[i] = loss_of(output, batch[i])
            elif kind == "backward of weights":
                stage.backward_weight_one_chunk(i)
            else:
                loss = own.get(i) if stage.is_last else None
                stage.backward_one_chunk(i, loss=loss, full_backward=kind == "backward")

    def step() -> None:
        for stage in stages:
            stage.clear_runtime_states()
        own.clear()
        for action in actions:
            perform(*action)
        losses.clear()
        losses.extend(own.values())

    return step
