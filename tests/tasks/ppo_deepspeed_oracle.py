"""An iteration of PPO with DeepSpeed's own engines: one around the policy and the value model, one around the reference and one
around the reward model, as TRL's prepare_deepspeed makes those that do not train."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from tasks.ppo_oracle import Measured, Meter, OnAGpu, PolicyAndValue, iterations, made, on_a_gpu

import memcalc
from memcalc.validate import deepspeed
from memcalc.validate.fake import process_group
from memcalc.validate.reference import nbytes


class Stepping:
    """The optimizer as accelerate's wrapper of a DeepSpeed engine leaves it to the trainer: the engine steps."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


@contextlib.contextmanager
def clipping() -> Iterator[None]:
    """Let the engine clip gradients where the setup does."""
    own = deepspeed.configuration

    def configuration(setup: Any) -> dict[str, Any]:
        return {**own(setup), "gradient_clipping": 1.0 if setup.clip_grad_norm else 0.0}

    with patch.object(deepspeed, "configuration", configuration):
        yield


@contextlib.contextmanager
def backward_by(engine: Any, micro_batches: int) -> Iterator[None]:
    """`loss.backward()` as `accelerator.backward(loss)` has it: the engine's, which calls the loss's own. accelerate's
    DeepSpeedEngineWrapper tells the engine with which micro-batch its gradients are complete."""
    own, inside, done = torch.Tensor.backward, [False], [0]

    def backward(self: Any, *args: Any, **named: Any) -> None:
        if inside[0]:
            own(self, *args, **named)
            return
        done[0] += 1
        engine.set_gradient_accumulation_boundary(is_boundary=done[0] % micro_batches == 0)
        inside[0] = True
        engine.backward(self)
        inside[0] = False

    with patch.object(torch.Tensor, "backward", backward):
        yield


def measured_rank(report: memcalc.Report, rank: int, run: Any = iterations, of: Any = PolicyAndValue) -> Measured:
    """The bytes of the second of two iterations on one rank."""
    s, live = report.setup, OnAGpu()
    with on_a_gpu(s), contextlib.ExitStack() as stack:
        stack.enter_context(process_group(s.gpus, rank))
        stack.enter_context(deepspeed.on_the_cpu(live.places))
        stack.enter_context(clipping())
        models = made(report, of)
        wrapper = models.wrapper
        for one in (wrapper.value_model, models.reward):
            one.float()  # as the policy and the reference are built: the engine casts weights, and leaves buffers
        for one in (wrapper, models.reference, models.reward):
            for tensor in () if one is None else (*one.parameters(), *one.buffers()):
                live.register(tensor)
        with live:
            engine = deepspeed.engine_of(s, wrapper, stack)
            models.wrapper = models.wrapped = engine
            models.reward = deepspeed.inference_engine(s, models.reward, stack)
            if models.reference is not None:
                models.reference = deepspeed.inference_engine(s, models.reference, stack)
        stack.enter_context(backward_by(engine, s.micro_batches))
        meter = Meter(live)
        gc.collect()
        with live:
            run(s, models, Stepping(engine), meter)
        job = type("Job", (), {"optimizer": engine.optimizer, "parameters": lambda self: list(wrapper.parameters())})()
        kept = deepspeed.kept_tensors(job)
        return Measured(parameters=nbytes(kept.parameters), states=nbytes(kept.states), peaks=dict(meter.peaks))


def measured(report: memcalc.Report, run: Any = iterations, of: Any = PolicyAndValue) -> list[Measured]:
    """The bytes of each rank that can be the worst."""
    return [measured_rank(report, rank, run, of) for rank in deepspeed.ranks_to_run(report.setup, report.model)]
