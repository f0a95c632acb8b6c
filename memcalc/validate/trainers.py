# pyright: basic
"""The steps of TRL's trainers that `preference.py` has not: SFT over packed rows, GRPO on completions that are there, and any of
them whose saved activations move to the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from memcalc.errors import InputError
from memcalc.validate import preference
from memcalc.validate.dtypes import DTYPES

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup
    from memcalc.validate.live import Live
    from memcalc.validate.reference import Around, Enter, Job

Batch = dict[str, torch.Tensor]


def import_of_trl(name: str, option: str) -> Any:
    """Import a module of TRL for an option. Raises InputError without TRL, or with another version."""
    try:
        return preference._trl(name)
    except InputError as error:
        raise InputError(f"{option}{str(error).removeprefix('--task')}") from None


def trainer_job(
    setup: Setup,
    made: Callable[[Setup], Any],
    batch: Batch,
    within: Callable[[Any, Around], Around],
    live: Live,
    stack: contextlib.ExitStack,
) -> Job:
    """Return a job of TRL's trainer over a batch. `made` builds a model of a setup; `within` returns the context of a model's
    micro-batches, given its engine's; `live` is told of DDP's buckets, and of what DeepSpeed makes."""
    from memcalc.validate.engines import replicated
    from memcalc.validate.own_optimizers import optimizer_of
    from memcalc.validate.reference import Job

    policy = made(setup)
    around = within(policy, lambda follows: contextlib.nullcontext())
    _with_head(setup, policy, metrics=True)
    reference = None
    if setup.has_reference:
        plain = setup._replace(recompute="none", recompute_layers=None, freeze=None, input_require_grads=False)
        reference = made(plain)
        _with_head(setup, reference, metrics=False)
    modules = [policy] if reference is None else [policy, reference]
    if setup.engine == "deepspeed":
        return _deepspeed_job(setup, modules, batch, live, stack)
    optimizer, model = optimizer_of(setup, policy), policy
    if setup.engine == "ddp":
        model, held_back = replicated(setup, policy, live)
        around = within(policy, held_back)
    trainer = _trainer(setup, policy, reference)
    return Job(modules, optimizer, batch, _step(setup, policy, lambda: _loss(trainer, model, batch), optimizer, around))


def _step(setup: Setup, policy: Any, loss: Callable[[], Any], optimizer: Any, around: Around) -> Callable[[Enter], int]:
    """Return a step. `loss` runs a micro-batch's forward; the last loss is held until there is a new one."""
    from memcalc.validate.reference import nbytes

    losses: list[Any] = [None]
    parameters = list(policy.parameters())

    def step(enter: Enter) -> int:
        for micro_batch in range(setup.micro_batches):
            with around(micro_batch < setup.micro_batches - 1):
                enter("forward")
                losses[0] = loss()
                enter("backward")
                losses[0].backward()
        gradients = nbytes(p.grad for p in parameters)
        enter("step")
        if setup.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return gradients

    return step


def _deepspeed_job(setup: Setup, modules: list[Any], batch: Batch, live: Live, stack: contextlib.ExitStack) -> Job:
    """Return the job with an engine around the policy, and one around the reference, if there is one."""
    from memcalc.validate import deepspeed, two_places
    from memcalc.validate.reference import Job

    for tensor in [*batch.values(), *(t for m in modules for t in (*m.parameters(), *m.buffers()))]:
        live.register(tensor)
    with live, live.on_two_places():
        deepspeed.load()
        engine = (two_places if setup.offloads else deepspeed).engine_of(setup, modules[0], stack)
        others = [deepspeed.inference_engine(setup, module, stack) for module in modules[1:]]
        trainer = _trainer(setup, modules[0], others[0] if others else None)
        step = deepspeed.stepping(setup, engine, modules[0], lambda: _loss(trainer, engine, batch))
        return Job(modules, engine.optimizer, batch, step)


def _loss(trainer: Any, model: Any, batch: Batch) -> Any:
    """Return what a trainer computes from a batch; GRPO's takes the next of the completions that were generated together."""
    if not hasattr(trainer, "num_generations"):
        return preference._loss(trainer, model, batch)
    size = trainer.args.per_device_train_batch_size
    return trainer._compute_loss(model, {name: x[:size] if x.ndim else x for name, x in batch.items()})


def _with_head(setup: Setup, model: Any, *, metrics: bool) -> None:
    """Give a model TRL's head, and a context of autocast around its forward: GRPO's asks for two of its results alone."""
    if setup.task != "grpo":
        preference.with_head(setup, model, metrics=metrics)
        return
    utils = import_of_trl("trl.trainer.utils", "--task")
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    utils.add_fused_lm_head(base, **({"outputs": ("log_probs", "entropy")} if metrics else {}))
    if setup.autocast_dtype is not None:
        model.forward = torch.autocast("cpu", DTYPES[setup.autocast_dtype])(model.forward)


def _trainer(setup: Setup, model: Any, reference: Any) -> Any:
    """Return a trainer with the attributes that its loss reads; GRPO's are TRL's defaults."""
    trainer = preference._trainer(setup, model, reference)
    if setup.task != "grpo":
        return trainer
    dtype = setup.autocast_dtype

    def autocast() -> Any:
        return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", DTYPES[dtype])

    vars(trainer.accelerator).update(autocast=autocast, reduce=lambda x, reduction: x, is_main_process=False)
    own: dict[str, Any] = {
        "beta": setup.beta, "loss_type": "dapo", "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "use_vllm": False,
        "vllm_importance_sampling_correction": True, "_entropy_bonus_enabled": False,
        "num_generations": setup.num_generations, "current_gradient_accumulation_steps": setup.micro_batches,
        "args": SimpleNamespace(
            per_device_train_batch_size=setup.micro_batch_size, steps_per_generation=setup.steps_per_generation,
            use_bias_correction_kl=True, delta=None,
        ),
    }  # fmt: skip
    vars(trainer).update(own)
    return trainer


def completions_of(setup: Setup) -> Batch:
    """Return the buffered completions of a generation, as GRPOTrainer's `_generate_and_score_completions` returns them."""
    assert setup.seq_len is not None
    assert setup.completion_len is not None
    assert setup.steps_per_generation is not None
    assert setup.num_iterations is not None
    together = setup.micro_batch_size * setup.steps_per_generation
    completion, prompt = setup.completion_len, setup.seq_len - setup.completion_len
    batch = {
        "prompt_ids": torch.zeros((together, prompt), dtype=torch.int64),
        "prompt_mask": torch.ones((together, prompt), dtype=torch.int64),
        "completion_ids": torch.zeros((together, completion), dtype=torch.int64),
        "completion_mask": torch.ones((together, completion), dtype=torch.int64),
        "advantages": torch.zeros(together),
        "num_items_in_batch": torch.tensor(together * completion),
    }
    if setup.micro_batches % (setup.steps_per_generation * setup.num_iterations):
        batch["old_per_token_logps"] = torch.zeros((together, completion))
    if setup.beta:
        batch["ref_per_token_logps"] = torch.zeros((together, completion))
    return batch
