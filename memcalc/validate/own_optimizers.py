# pyright: basic
"""The optimizers that want a model and not its parameters alone: Adam-mini, and LOMO and AdaLomo, which update in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch

from memcalc.errors import InputError, one_line
from memcalc.validate.dtypes import DTYPES
from memcalc.validate.optimizers import MasterWeights, make_optimizer
from memcalc.validate.reference import Job
from memcalc.validate.special import OF_MODELS

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup
    from memcalc.validate.reference import Enter

_LEARNING_RATE: Final = 1e-3


def optimizer_of(setup: Setup, module: Any) -> Any:
    """Return the optimizer of a module whose step comes after backward. Raises InputError without its package."""
    return (
        _adam_mini(setup, _package(setup), module) if setup.optimizer == "adam-mini" else make_optimizer(setup, module)
    )


def lomo_job(setup: Setup, module: Any, batch: dict[str, torch.Tensor]) -> Job:
    """Return the job of one GPU with LOMO or AdaLomo. Raises InputError without the optimizer's package."""
    package = _package(setup)
    made = (package.AdaLomo if setup.optimizer == "adalomo" else package.Lomo)(module, lr=_LEARNING_RATE)
    return Job([module], _Moments(made), batch, _updating_in_backward(setup, module, made, batch))


def _package(setup: Setup) -> Any:
    name = OF_MODELS[setup.optimizer]
    try:
        return import_module(name)
    except Exception as error:  # a package with compiled parts can fail in any way
        why = f"needs pip install {name.replace('_', '-')} to be run ({one_line(error)})"
        raise InputError(f"--optimizer {setup.optimizer}: {why}") from None


def _adam_mini(setup: Setup, package: Any, module: Any) -> Any:
    """Return Adam-mini over the weights that train, by their names, or over fp32 copies of them."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    config = module.config
    how = {
        "dim": config.hidden_size, "n_heads": config.num_attention_heads, "verbose": False,
        "n_kv_heads": getattr(config, "num_key_value_heads", None),
    }  # fmt: skip
    if not setup.has_master_weights:
        return package.Adam_mini(list(named.items()), **how)
    masters = MasterWeights(list(named.values()), [], setup._replace(optimizer="sgd"))
    masters.optimizer = package.Adam_mini(list(zip(named, masters.masters, strict=True)), **how)
    return masters


class _Moments:
    """An optimizer without a step, whose moments are lists of its own."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self.param_groups = made.param_groups

    @property
    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: getattr(self.made, name, {}) for name in ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")}


def _updating_in_backward(setup: Setup, module: Any, made: Any, batch: dict[str, torch.Tensor]) -> Any:
    """Return a step whose gradients never exist all at once. So it returns None as their bytes."""
    losses: list[Any] = [None]
    dtype = setup.autocast_dtype

    def step(enter: Enter) -> None:
        enter("forward")
        with torch.autocast("cpu", None if dtype is None else DTYPES[dtype], enabled=dtype is not None):
            out = module(**batch)
        losses[0] = out.loss
        del out
        enter("backward")
        made.fused_backward(losses[0], _LEARNING_RATE)
        enter("step")

    return step


@contextlib.contextmanager
def moments_on_the_gpu(setup: Setup) -> Iterator[None]:
    """Let AdaLomo's moments be made where the weights are, within a block: it says `cuda()`."""
    if setup.optimizer != "adalomo":
        yield
        return
    with patch.object(torch.Tensor, "cuda", lambda tensor: tensor):
        yield
