"""What Transformer Engine's FusedAdam really keeps and allocates with the arguments of Megatron's precision-aware optimizer.

Its Python (optimizers/fused_adam.py, tensor/float8_tensor.py) is the real one, loaded out of the installed package, which
without its compiled parts cannot be imported: those are stand-ins that allocate nothing but the fp32 result of a
dequantisation. The gradients are `decoupled_grad`, as the distributed optimizer gives them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from oracle import LiveBytes
from torch.overrides import TorchFunctionMode

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
_PACKAGES = "", ".common", ".pytorch", ".pytorch.tensor", ".pytorch.optimizers"


class _Names(type):
    """Any name of a dtype is a number."""

    def __getattr__(cls, name: str) -> int:
        if not name.startswith("k"):
            raise AttributeError(name)
        return sum(map(ord, name))


class _DType(metaclass=_Names):
    pass


@contextlib.contextmanager
def _transformer_engine() -> Iterator[Any]:
    """FusedAdam of the installed package; its packages are not run, but for the modules that it imports."""
    root = Path(str(importlib.metadata.distribution("transformer-engine").locate_file("transformer_engine")))
    compiled = mock.MagicMock()
    compiled.DType = _DType
    compiled.quantize = lambda *_: None
    compiled.dequantize = lambda tensor, _: torch.empty(tensor.shape, dtype=torch.float32)
    compiled.multi_tensor_adam = compiled.multi_tensor_adam_param_remainder = lambda *_: None
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("transformer_engine")}
    try:
        for name in _PACKAGES:
            module = ModuleType("transformer_engine" + name)
            module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            sys.modules["transformer_engine" + name] = module
        sys.modules["transformer_engine_torch"] = compiled
        yield importlib.import_module("transformer_engine.pytorch.optimizers.fused_adam")
    finally:
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            del sys.modules[name]
        sys.modules.update(before)


class _OnCPU(TorchFunctionMode):
    """The optimizer asks for CUDA tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


@dataclass
class Stepped:
    """Bytes of the states, and of what a later step has at most beside them."""

    states: int
    step: int


def fused_adam(
    sizes: Sequence[int],
    *,
    dtype: str = "bf16",
    main_params: str = "fp32",
    exp_avg: str = "fp32",
    exp_avg_sq: str = "fp32",
) -> Stepped:
    """The second step over parameters of these elements, in one group."""
    current = mock.patch("torch.cuda.current_device", lambda: torch.device("cpu"))
    with _transformer_engine() as module, _OnCPU(), current:
        parameters = [torch.nn.Parameter(torch.zeros(n, dtype=DTYPES[dtype])) for n in sizes]
        mode = LiveBytes()
        with mode:
            for one in parameters:
                mode.register(one)
            optimizer = module.FusedAdam(
                parameters, lr=1e-3, adam_w_mode=True, master_weights=True, use_decoupled_grad=True,
                exp_avg_dtype=DTYPES[exp_avg], exp_avg_sq_dtype=DTYPES[exp_avg_sq], master_weight_dtype=DTYPES[main_params],
                store_param_remainders=True,
            )  # fmt: skip
            created = mode.now
            for _ in range(2):
                for one in parameters:
                    one.decoupled_grad = one.detach()
                gc.collect()
                states = mode.now - created
                mode.highest = mode.now
                optimizer.step()
        return Stepped(states, mode.highest - created - states)
