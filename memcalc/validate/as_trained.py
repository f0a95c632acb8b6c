# pyright: basic
"""Contexts that tell the real code what the reference step alone does not say: checkpoints that re-enter autograd, adapters of
fused experts, and flash-attn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.inputs.options import NOT_YET, refuse
from memcalc.validate import run
from memcalc.validate.suites import model_of, options_of

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.setup.setup import Setup
    from memcalc.validate.comparison import Comparison
    from memcalc.validate.suites import Case


def validate(model: Any, *, backend: str = "fake", **options: Any) -> Comparison:
    """Estimate a setup, run it as it is trained, and put both side by side. Raises InputError as memcalc.validate.run does."""
    report = estimate(model, **options)
    check_task(report)
    with as_trained(report.setup, backend):
        return run.validate(model, backend=backend, **options)


def outcome(case: Case, backend: str) -> dict[str, Any]:
    """Return a case of a suite as its record has it. No exception of the case gets out."""
    try:
        report = estimate(model_of(case), **options_of(case))
    except Exception:  # the run fails in the same way, and says how
        return run.outcome(case, backend)
    try:
        check_task(report)
    except InputError as error:
        return {"outcome": "refused", "why": str(error)}
    with as_trained(report.setup, backend):
        return run.outcome(case, backend)


def check_task(report: Report) -> None:
    """Raise InputError for a task that is estimated, and has no step to run."""
    if report.setup.task == "ppo":
        refuse("task", "ppo", f"in a run {NOT_YET}pretrain, sft, dpo, kto, grpo; memcalc estimate takes it")


@contextlib.contextmanager
def as_trained(setup: Setup, backend: str) -> Iterator[None]:
    """Let a run within a block be that of the setup's checkpoints and adapters."""
    with contextlib.ExitStack() as stack:
        if setup.reentrant_checkpoints:
            stack.enter_context(reentrant_checkpoints())
            if backend == "fake":
                stack.enter_context(kernels_without_a_graph())
        if setup.lora_rank and backend == "fake":
            stack.enter_context(adapters_of_parameters())
        if setup.has_flash_attn:
            from memcalc.validate.flash import built_with_flash_attn, kernels_of_flash_attn

            stack.enter_context(built_with_flash_attn())
            if backend == "fake":
                stack.enter_context(kernels_of_flash_attn())
        yield


# --- checkpoints


@contextlib.contextmanager
def reentrant_checkpoints() -> Iterator[None]:
    """Let transformers' checkpoints within a block have `use_reentrant=True`. TRL's trainers switch them off for a reference,
    and on again as their arguments say."""
    from memcalc.validate import preference, reference

    made, how = preference._trainer, {"use_reentrant": True}

    def switch(model: Any, policy: object) -> None:
        assert policy is None, "--recompute op has a context, which these checkpoints cannot have"
        model.gradient_checkpointing_enable(how)

    def trainer(*args: Any) -> Any:
        one = made(*args)
        one.args.gradient_checkpointing_kwargs = how
        return one

    with patch.object(reference, "recompute", switch), patch.object(preference, "_trainer", trainer):
        yield


@contextlib.contextmanager
def kernels_without_a_graph() -> Iterator[None]:
    """Let attention take CUDA's kernels within a block, for a mask that wants a gradient where there is no graph. The CPU takes
    none there, but CUDA does not see that the mask wants one."""
    import torch

    from memcalc.validate import realism

    kernel = realism._SDPA

    def sdpa(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        mask = attn_mask if attn_mask is None or torch.is_grad_enabled() else attn_mask.detach()
        return kernel(query, key, value, mask, *args, **kwargs)

    with patch.object(realism, "_SDPA", sdpa):
        yield


# --- adapters


@contextlib.contextmanager
def adapters_of_parameters() -> Iterator[None]:
    """Let peft's adapters of parameters (ParamWrapper) be within a block as on a GPU. peft casts them with `Module.to`, which
    leaves tensors without data as they are, and multiplies matrices of 16 bits in fp32 on a CPU alone
    (peft/tuners/lora/layer.py, Linear.get_delta_weight). Without peft nothing is changed."""
    try:
        from peft.tuners.lora import layer
    except (
        Exception
    ):  # the import looks for other packages, which can fail in any way; the run says that peft is missing
        yield
        return
    from memcalc.tracing.modules import cast_tensors

    def move(self: Any, adapter_name: str, device: Any = None) -> None:
        for name in self.adapter_layer_names:
            if adapter_name in getattr(self, name):
                cast_tensors(getattr(self, name)[adapter_name], self.get_param().dtype)

    def delta(self: Any, adapter: str) -> Any:
        return (self.lora_B[adapter].weight @ self.lora_A[adapter].weight) * self.scaling[adapter]

    with contextlib.ExitStack() as stack:
        wrapper: Any = getattr(layer, "ParamWrapper", None)  # older versions have none
        if wrapper is not None:
            stack.enter_context(patch.object(wrapper, "_move_adapter_to_device_of_base_layer", move))
            stack.enter_context(patch.object(layer.Linear, "get_delta_weight", delta))
        yield
