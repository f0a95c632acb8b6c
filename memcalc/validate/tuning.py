# pyright: basic
"""The choice of what trains, made on the real module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from memcalc.errors import InputError, one_line
from memcalc.setup.setup import DTYPES as BY_NAME
from memcalc.tracing.modules import cast_tensors
from memcalc.tuning.parts import full_name
from memcalc.tuning.saved import listed
from memcalc.validate.dtypes import DTYPES
from memcalc.validate.preference import is_of_trl

if TYPE_CHECKING:
    from torch.nn import Module

    from memcalc.families.base.program import Program
    from memcalc.setup.setup import Setup


def tune(module: Module, setup: Setup, program: Program) -> Module:
    """Return the module with the setup's adapters or frozen weights."""
    if setup.lora_rank:
        return _with_adapters(module, setup)
    if program.held:
        _freeze(module, program)
    return module


def _with_adapters(module: Any, setup: Setup) -> Module:
    """Return the module with peft's adapters in it. Raises InputError without peft."""
    try:
        import peft
    except Exception as error:  # the import looks for other packages, which can fail in any way
        why = f"needs pip install 'memcalc-llm[adapters]' to be run ({one_line(error)})"
        raise InputError(f"--lora-rank {setup.lora_rank}: {why}") from None
    targets = setup.lora_targets or "default"
    options: dict[str, Any] = {"lora_dropout": setup.lora_dropout, "bias": setup.lora_bias, "use_dora": setup.dora}
    if setup.modules_to_save is not None:
        options["modules_to_save"] = list(listed(setup.modules_to_save))
    config = peft.LoraConfig(
        r=setup.lora_rank,
        target_modules=None if targets == "default" else targets if targets == "all-linear" else list(listed(targets)),
        **options,
    )
    with cast_like_the_base(), copied_as_fake():
        adapted: Any = peft.get_peft_model(module, config, autocast_adapter_dtype=setup.adapter_dtype == "fp32")
    if setup.quantize != "none" and setup.adapter_dtype != "fp32":
        _cast_adapters(adapted, DTYPES[BY_NAME[setup.adapter_dtype or "fp32"]])
    return adapted if is_of_trl(setup) else adapted.get_base_model()


def _cast_adapters(model: Any, dtype: torch.dtype) -> None:
    """Cast the adapters, which peft makes in fp32 beside quantised weights, as launchers of 16-bit adapters do."""
    for name, module in model.named_modules():
        if "lora_" in name:
            cast_tensors(module, dtype)


@contextlib.contextmanager
def cast_like_the_base() -> Iterator[None]:
    """Let peft cast an adapter to the dtype of its base tensor by tensor, and move nothing: `Module.to` fails on fake
    tensors, and all tensors are on one device."""
    from peft.tuners import tuners_utils

    tuner_layer: Any = tuners_utils.BaseTunerLayer

    def move(layer: Any, adapter_name: str, device: Any = None) -> None:
        dtype = layer.get_base_layer().weight.dtype
        for name in layer.adapter_layer_names:
            own = getattr(layer, name)
            if dtype.is_floating_point and adapter_name in own and isinstance(own[adapter_name], torch.nn.Module):
                cast_tensors(own[adapter_name], dtype)

    def stay(module: Any, *_: Any, **__: Any) -> Any:
        return module

    moves, to = tuner_layer._move_adapter_to_device_of_base_layer, torch.nn.Module.to
    tuner_layer._move_adapter_to_device_of_base_layer = move
    torch.nn.Module.to = stay  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.to = to  # type: ignore[method-assign]
        tuner_layer._move_adapter_to_device_of_base_layer = moves


@contextlib.contextmanager
def copied_as_fake() -> Iterator[None]:
    """Let `copy.deepcopy` make a fake tensor of the same mode. torch's own copies the mode too, and tensors of two modes do
    not meet in an op."""
    from torch._subclasses.fake_tensor import FakeTensor

    def fresh(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = torch.empty_like(tensor.detach())
        if isinstance(tensor, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, tensor.requires_grad)
        return memo.setdefault(id(tensor), copied)

    FakeTensor.__deepcopy__ = fresh  # type: ignore[method-assign]
    try:
        yield
    finally:
        del FakeTensor.__deepcopy__


def _freeze(module: Module, program: Program) -> None:
    """Freeze the weights of a module that want no gradient in the program."""
    wants = {full_name(weight): program.wants_gradient(weight) for weight in program.weights()}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(wants[name])


def require_input_grads(module: Any, setup: Setup) -> None:
    """Let the output of the embeddings want a gradient, or not. transformers' switch of checkpointing has let it."""
    if setup.input_require_grads:
        module.enable_input_require_grads()
    elif setup.recompute != "none":
        module.disable_input_require_grads()
