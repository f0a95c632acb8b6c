"""TRL 1.12's own PPOTrainer.train over the models of `ppo_oracle`: the same measurement of its phases. Later versions have no
PPOTrainer; a folder with 1.12 in PYTHONPATH has it before the installed one."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from tasks.ppo_oracle import PAD
from tasks.trl_oracle import _OF_DATA, _stand_in

_TRAINER = "trl.experimental.ppo.ppo_trainer"


def import_ppo() -> Any:
    """Import the trainer, without the packages for data sets where they are not installed. ImportError without the trainer."""
    importlib.import_module("trl.experimental.ppo.ppo_config" if _TRAINER in sys.modules else "trl")
    import transformers

    _ = transformers.Trainer  # looks for the packages itself
    missing = {name: _stand_in(name) for name in _OF_DATA if importlib.util.find_spec(name.partition(".")[0]) is None}
    sys.modules.update(missing)
    try:
        return importlib.import_module(_TRAINER)
    finally:
        for name in missing:
            del sys.modules[name]


class _Optimizer:
    """accelerate's optimizer, which steps with the last micro-batch alone."""

    def __init__(self, own: Any, meter: Any, counted: Any) -> None:
        self.own, self.meter, self.counted = own, meter, counted

    def step(self) -> None:
        self.meter.enter("step")
        if self.counted():
            self.own.step()

    def zero_grad(self) -> None:
        if self.counted():
            self.own.zero_grad(set_to_none=True)
        self.meter.live.numbers_are_ones = False


def iterations_of_trl(s: Any, models: Any, optimizer: Any, meter: Any) -> None:
    """Run two iterations of the trainer; the last one is measured."""
    module = import_ppo()
    local = s.micro_batch_size * s.micro_batches
    done = [0]
    wrapper = models.wrapper

    @contextlib.contextmanager
    def accumulate(_: Any) -> Iterator[None]:
        done[0] += 1
        meter.enter("forward")
        yield

    def backward(loss: torch.Tensor) -> None:
        meter.enter("backward")
        loss.backward()

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            meter.peaks.clear()
            meter.enter("generate")
            shape = local, s.seq_len - s.completion_len
            yield {name: torch.ones(shape, dtype=torch.int64) for name in ("input_ids", "attention_mask")}

    def gathered(x: torch.Tensor) -> torch.Tensor:
        if meter.phase:
            meter.enter("")
            meter.phase = ""
        return x

    def generated(*args: Any) -> Any:
        out = own(*args)
        meter.enter("score")
        return out

    own = module.batch_generation
    trainer = object.__new__(module.PPOTrainer)
    control = SimpleNamespace(should_save=False)
    handler = SimpleNamespace(
        on_train_begin=lambda *_: control, on_step_end=lambda *_: control, on_train_end=lambda *_: control
    )
    vars(trainer).update(
        args=SimpleNamespace(
            response_length=s.completion_len, temperature=0.7, num_ppo_epochs=s.num_iterations, num_total_batches=2,
            num_mini_batches=s.num_mini_batches, gradient_accumulation_steps=s.micro_batches, total_episodes=2 * local,
            logging_steps=None, eval_steps=None, save_steps=None, batch_size=local, local_batch_size=local,
            local_mini_batch_size=local // s.num_mini_batches, per_device_train_batch_size=s.micro_batch_size,
            local_rollout_forward_batch_size=s.rollout_batch_size, ds3_gather_for_generation=True, missing_eos_penalty=None,
            kl_estimator="k1", kl_coef=0.05, whiten_rewards=False, gamma=1.0, lam=0.95, cliprange=0.2, cliprange_value=0.2,
            vf_coef=0.1, num_sample_generations=0,
        ),
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), print=lambda _: None, accumulate=accumulate, backward=backward,
            unwrap_model=lambda model, **_: model, gather_for_metrics=gathered, state=SimpleNamespace(deepspeed_plugin=None),
        ),
        optimizer=_Optimizer(optimizer, meter, lambda: done[0] % s.micro_batches == 0), model=wrapper,
        ref_model=models.reference, reward_model=models.reward, stop_token_id=None, train_dataset_len=local,
        processing_class=SimpleNamespace(pad_token_id=PAD, eos_token_id=PAD), is_deepspeed_enabled=False,
        is_peft_model=models.reference is None, ref_adapter_name=None, model_adapter_name=None, dataloader=batches(),
        state=SimpleNamespace(), control=control, callback_handler=handler, log=lambda _: None,
        lr_scheduler=SimpleNamespace(step=lambda: None, get_last_lr=lambda: [0.0]),
    )  # fmt: skip
    with patch.object(module, "batch_generation", generated):
        trainer.train()


def wrapper_of_trl(policy: Any, value_model: Any) -> Any:
    """TRL's own wrapper of policy and value model."""
    return import_ppo().PolicyAndValueWrapper(policy, value_model)
