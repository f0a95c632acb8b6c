# pyright: basic
"""One training step of a real module under fake tensors, written into memcalc's log."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Module

from memcalc.core.selective import Policy
from memcalc.core.tensor import Memory
from memcalc.errors import InputError, one_line
from memcalc.families.base.module import Run
from memcalc.tracing.description import Place, place
from memcalc.tracing.modules import quiet, stacks, to_run
from memcalc.tracing.realism import collected_by_hand, gpu_dropout, not_initialized, not_taken_for_compiling
from memcalc.tracing.recorder import Recorder
from memcalc.tracing.selective import context_fn


def _require_input_grads(model: Any, run: Run) -> None:
    if run.input_require_grads:
        model.enable_input_require_grads()
    elif run.recompute:
        model.disable_input_require_grads()


def step(run: Run, config: Any, held: Mapping[int | None, frozenset[str]]) -> int:
    """Run forward and backward of the reference step in its steady state. Returns the index in the run's log at which
    forward ends. `held` are the names of the frozen weights by their layer."""
    with FakeTensorMode(allow_non_fake_inputs=True), not_taken_for_compiling(), quiet(), collected_by_hand():
        with not_initialized():
            model = to_run(config, run.attention, run.dtype)
        if run.recompute:
            recompute(model, run.policy)
        _require_input_grads(model, run)
        if held:
            _freeze(model, held)
        memory = Memory()
        recorder = Recorder(memory, model)
        with gpu_dropout(), recorder:
            ids = torch.zeros((run.batch.size, run.seq.size), dtype=torch.int64)
            recorder.relabel(ids, "buffers", Place("input ids", None))
            # Of the previous step, the loss and the tensors that modules keep are alive; gradients are too within one
            # step.
            loss = forward(model, ids, recorder)
            if run.accumulating:
                loss.backward()
            loss = loss.detach()  # from the graph of a forward without backward
            recorder.restart(model)
            memory.enter("forward", None)
            loss = forward(model, ids, recorder)
            forward_end = len(memory.log)
            memory.enter("backward", None)
            memory.scope = "loss"
            loss.backward()
        run.memory.log, run.memory.rows, run.memory.segments = list(memory.log), memory.rows, memory.segments
        run.memory.renamed, run.memory.work = memory.renamed, memory.work
        run.memory.streamed = memory.streamed
    return forward_end


def _freeze(model: Module, held: Mapping[int | None, frozenset[str]]) -> None:
    paths = stacks(model)
    for name, parameter in model.named_parameters():
        at = place(name, paths)
        if at.name in held.get(at.layer, ()):
            parameter.requires_grad_(False)


def forward(model: Module, ids: torch.Tensor, recorder: Recorder) -> torch.Tensor:
    """Return the loss. Other outputs of the model are freed, and so are cycles."""
    loss = model(input_ids=ids, labels=ids).loss
    gc.collect()
    recorder.relabel(loss, "activation", Place("loss", None))
    return loss


def recompute(model: Any, policy: Policy | None) -> None:
    """Checkpoint every layer; results that `policy` keeps are not computed again. Raises InputError if transformers
    does not offer it."""
    how: dict[str, Any] = {"use_reentrant": False}
    if policy is not None:
        how["context_fn"] = context_fn(policy)
    try:
        model.gradient_checkpointing_enable(how)
    except ValueError as error:
        option = "full" if policy is None else "op"
        raise InputError(f"--recompute {option}: {one_line(error, 200)}; allowed: none") from None
