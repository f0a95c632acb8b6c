"""TRL's GRPOTrainer over transformers' models: its loss as `memcalc validate` runs the other trainers' losses."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from tasks.trl_oracle import _OF_DATA, _stand_in, import_trl

import memcalc
from memcalc.validate import fake, preference, run
from memcalc.validate.comparison import Comparison, Measured
from memcalc.validate.trainers import completions_of

_with_head, _made_trainer = preference.with_head, preference._trainer


def import_grpo() -> None:
    import_trl()
    if "trl.trainer.grpo_trainer" in sys.modules:
        return
    missing = {name: _stand_in(name) for name in _OF_DATA if importlib.util.find_spec(name.partition(".")[0]) is None}
    sys.modules.update(missing)
    try:
        importlib.import_module("trl.trainer.grpo_trainer")
    finally:
        for name in missing:
            del sys.modules[name]


def _loss(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> Any:
    size = trainer.args.per_device_train_batch_size
    return trainer._compute_loss(model, {name: x[:size] if x.ndim else x for name, x in batch.items()})


def trainer_of(setup: Any, model: Any, reference: Any) -> Any:
    trainer = _made_trainer(setup, model, reference)
    autocast: Any = contextlib.nullcontext
    if setup.autocast_dtype is not None:
        from memcalc.validate.reference import DTYPES

        dtype = DTYPES[setup.autocast_dtype]
        autocast = lambda: torch.autocast("cpu", dtype)  # noqa: E731
    accelerator = vars(trainer.accelerator)
    accelerator.update(autocast=autocast, reduce=lambda x, reduction: x, is_main_process=False)
    own: dict[str, Any] = {
        "beta": setup.beta, "loss_type": "dapo", "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "use_vllm": False,
        "vllm_importance_sampling_correction": True, "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": setup.micro_batches,
        "args": SimpleNamespace(
            per_device_train_batch_size=setup.micro_batch_size, steps_per_generation=setup.steps_per_generation,
            use_bias_correction_kl=True, delta=None,
        ),
    }  # fmt: skip
    vars(trainer).update(own)
    return trainer


def with_head(setup: Any, model: Any, *, metrics: bool) -> None:
    """Give a model TRL's head, as `GRPOTrainer.__init__` does, and accelerate's context of autocast."""
    from memcalc.validate.reference import DTYPES

    utils = importlib.import_module("trl.trainer.utils")
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    utils.add_fused_lm_head(base, **({"outputs": ("log_probs", "entropy")} if metrics else {}))
    if setup.autocast_dtype is not None:
        model.forward = torch.autocast("cpu", DTYPES[setup.autocast_dtype])(model.forward)


@contextlib.contextmanager
def grpo() -> Any:
    import_grpo()
    with contextlib.ExitStack() as stack:
        for name, own in (
            ("batch_of", completions_of), ("_loss", _loss), ("_trainer", trainer_of), ("with_head", with_head),
        ):  # fmt: skip
            stack.enter_context(patch.object(preference, name, own))
        yield


def measured(report: memcalc.Report) -> Measured:
    return fake.measure(report)._replace(environment={})


def validate(model: Any, **options: Any) -> Comparison:
    import_grpo()
    return run.validate(model, **{"task": "grpo", **options})
