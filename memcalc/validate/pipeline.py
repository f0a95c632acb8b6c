# pyright: basic
"""A pipeline rank of torch.distributed.pipelining: its stages under `fully_shard`, and a schedule that drives them.

A stage is a copy of transformers' model without the layers of the others. Its forward is transformers' own, given the
hidden states as `inputs_embeds`; the last stage's is that of the whole model. Over a fake group nothing arrives, so
stages are told what they otherwise agree on before their first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage, schedules

from memcalc.pipelining.orders import order
from memcalc.pipelining.placement import places
from memcalc.pipelining.programs import Span, spans
from memcalc.pipelining.schedules import NAMES, placement_of, schedule_of
from memcalc.validate.context_parallel import ROTATES, shared_tensors, without_masks
from memcalc.validate.dtypes import DTYPES
from memcalc.validate.engines import split_logits, under_loss_parallel
from memcalc.validate.optimizers import by_mesh, make
from memcalc.validate.reference import Enter, Job, nbytes

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
_TYPES: dict[str, Any] = {
    "forward": schedules.FORWARD, "backward": schedules.FULL_BACKWARD, "backward of inputs": schedules.BACKWARD_INPUT,
    "backward of weights": schedules.BACKWARD_WEIGHT,
}  # fmt: skip


class StageModule(torch.nn.Module):
    """Some layers of a causal language model, with the embedding before the first and the head behind the last."""

    def __init__(self, whole: Any, span: Span, positions: torch.Tensor | None) -> None:
        super().__init__()
        self.given = {"use_cache": False} if positions is None else {"use_cache": False, "position_ids": positions}
        model = whole.model
        own = slice(span.start, span.start + span.layers)
        model.layers = torch.nn.ModuleList(list(model.layers)[own])
        if getattr(model.config, "layer_types", None):  # looked up by a layer's place in the list
            model.config.layer_types = model.config.layer_types[own]
        if not span.first:
            model.embed_tokens = None
        if not span.last:
            model.norm = torch.nn.Identity()
        self.first = span.first
        self.whole = whole if span.last else None
        self.model = None if span.last else model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {"input_ids" if self.first else "inputs_embeds": x} | self.given
        if self.whole is not None:
            return self.whole(**given).logits
        assert self.model is not None
        return self.model(**given).last_hidden_state


def pipeline(
    setup: Setup,
    model: Model,
    rank: int,
    build: Callable[[], Any],
    shard: Callable[[Any], None],
    mesh: Any,
    *,
    alone: bool,
    wanted: Sequence[bool] | None = None,
) -> Job:
    """Return the job of a pipeline rank.

    `build` makes the whole model, with its tensor parallelism; `shard` puts a stage under `fully_shard` and on its
    device; `alone`: there are no other ranks; `wanted` tells of each stage whether its output wants a gradient (None: all
    do). If ranks have parts of a sequence, the caller gives positions: transformers would count the tokens of a part.
    """
    device = torch.device(mesh.device_type)
    whole_sequence = setup.seq_len or 1
    own_part = whole_sequence // setup.cp
    part = own_part // setup.tp if setup.sequence_parallel else own_part
    positions = torch.arange(whole_sequence, device=device).unsqueeze(0) if part < whole_sequence else None
    lying = stages_of(setup, model)[rank]
    own, in_all = (
        [span for _, span in lying],
        1 + max(number for of_rank in stages_of(setup, model) for number, _ in of_rank),
    )
    stages: list[Any] = []
    loss_of: Any = None
    for number, span in lying:
        whole = build()
        if setup.shares_sequences:
            without_masks(whole)
        loss_of = _loss(whole.loss_function, whole.config.vocab_size, shifted=setup.shares_sequences)
        sizes = setup.micro_batch_size, own_part
        between = setup.micro_batch_size, part
        hidden = torch.empty(*between, whole.config.hidden_size, dtype=DTYPES[setup.compute_dtype], device="meta")
        logits = hidden.new_empty(*sizes, whole.config.vocab_size)
        output = (logits if span.last else hidden.clone()).requires_grad_(wanted is None or wanted[number])
        tokens = torch.empty(sizes, dtype=torch.int64, device="meta")
        module = StageModule(whole, span, positions)
        del whole
        shard(module)
        stages.append(
            PipelineStage(
                module, number, in_all, device,
                input_args=tokens if span.first else hidden.requires_grad_(wanted is None or wanted[number - 1]),
                output_args=output, group=mesh.get_group("pp"),
            )
        )  # fmt: skip
    schedule = _scheduled(setup, stages, loss_of)
    if alone:
        schedule._warmup_p2p = _agreed
    optimizer = make(setup, by_mesh(p for stage in stages for p in stage.submod.parameters()))
    first, last = own[0].first, own[-1].last
    shape = setup.micro_batches * setup.micro_batch_size, whole_sequence
    ids = torch.zeros(shape if first or last else (0,), dtype=torch.int64, device=device)  # no tokens in between
    batch = {"input_ids": ids} if first or last else {}
    batch |= {} if positions is None else {"position_ids": positions}
    losses: list[torch.Tensor] = []
    entered: list[Enter] = [lambda phase: None]
    _watch(stages, lambda phase: entered[0](phase))

    def step(enter: Enter) -> int:
        entered[0] = enter
        given = (ids,) if first else ()
        target = {"target": ids, "losses": losses} if last else {}
        with _sharing(setup, mesh, [ids.resize_(shape)] if first or last else [], positions):
            enter("forward")
            schedule.step(*given, return_outputs=False, **target)
        gradients = nbytes(p.grad for stage in stages for p in stage.submod.parameters())
        enter("step")
        if setup.clip_grad_norm:
            clip_over_stages([p for stage in stages for p in stage.submod.parameters()], mesh.get_group("pp"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return gradients

    modules = [stage.submod for stage in stages]
    return Job(modules, optimizer, batch, under_loss_parallel(step) if split_logits(setup) else step)


def stages_of(setup: Setup, model: Model) -> list[list[tuple[int, Span]]]:
    """Return for each rank the number of each of its stages among all, and the stage's layers."""
    placement, chunks = placement_of(setup.schedule), setup.virtual_stages
    if setup.schedule in NAMES:
        chunks = schedule_of(setup.schedule).chunks
    cut = spans(model.layers, setup.pp, chunks, setup.first_stage_layers, setup.last_stage_layers, placement)
    numbers = [[at.stage for at in places(placement, rank, setup.pp, chunks)] for rank in range(setup.pp)]
    return [list(zip(own, of_rank, strict=True)) for own, of_rank in zip(numbers, cut, strict=True)]


def _scheduled(setup: Setup, stages: list[Any], loss_of: Any) -> Any:
    """Return torch's own schedule, or its runtime over the orders of all ranks."""
    if setup.schedule in SCHEDULES:
        of_one = setup.schedule in ("gpipe", "1f1b")
        return SCHEDULES[setup.schedule](stages[0] if of_one else stages, setup.micro_batches, loss_fn=loss_of)
    runtime: Any = schedules._PipelineScheduleRuntime(stages, setup.micro_batches, loss_fn=loss_of)
    orders = [order(setup.schedule, rank, setup.pp, setup.micro_batches) for rank in range(setup.pp)]
    runtime._prepare_schedule_with_comms(
        {rank: [schedules._Action(rank, _TYPES[kind], i) for kind, _, i in own] for rank, own in enumerate(orders)}
    )
    return runtime


def clip_over_stages(parameters: list[Any], group: Any) -> None:
    """Clip by the norm of the gradients of all stages, as torchtitan's clip_grad_norm_ does (distributed/utils.py)."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    norm **= 2
    torch.distributed.all_reduce(norm, group=group)
    norm **= 0.5
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)


def _sharing(
    setup: Setup, mesh: Any, batch: list[torch.Tensor], positions: torch.Tensor | None
) -> contextlib.AbstractContextManager[None]:
    """Return torch's context around a schedule's step (torchtitan's train.py) if ranks share sequences."""
    if not setup.shares_sequences or positions is None:
        return contextlib.nullcontext()
    return shared_tensors(mesh["cp"], batch, [positions], ROTATES[setup.cp_comm_type or "all_gather"])


def _loss(function: Any, vocab: int, *, shifted: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the model's loss function. `shifted`: the caller has shifted the labels, as it must if they are parts of a
    sequence."""

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        given = {"shift_labels": target} if shifted else {}
        return function(logits=output, labels=target, vocab_size=vocab, **given)

    return loss_of


def _agreed(stages: list[Any], *_: Any) -> None:
    """Set what the stages of torch 2.13 agree on. Stages of older versions take what they were given."""
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def _watch(stages: list[Any], enter: Enter) -> None:
    """Report the phase of each of a schedule's actions. The reduction of gradients belongs to backward."""

    def entering(phase: str, method: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            enter(phase)
            return method(*args, **named)

        return call

    for stage in stages:
        stage.forward_one_chunk = entering("forward", stage.forward_one_chunk)
        for name in ("backward_one_chunk", "backward_weight_one_chunk", "perform_reduce_grad"):
            setattr(stage, name, entering("backward", getattr(stage, name)))
