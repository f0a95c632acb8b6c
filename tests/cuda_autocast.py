"""`torch.autocast` as CUDA has it, for traces on the CPU.

The CPU's autocast has other op lists (softmax, layer_norm, pow, rsqrt and sum are not cast; cat and stack are). Here the
dispatcher gets CUDA's lists for CPU tensors. Contexts, the weight cache and the casts of the lower-precision ops that both
lists have stay torch's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_iter, tree_map

POLICIES = {
    "AT_FORALL_LOWER_PRECISION_FP": "lower precision",
    "AT_FORALL_FP32": "fp32",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "fp32 result",
    "AT_FORALL_PROMOTE": "promote",
}
"""The lists of aten/src/ATen/autocast_mode.h. The ops of AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE (norm) are left out."""


def cuda_lists() -> dict[str, str]:
    """Op (with its overload) -> policy, from the header that torch installs."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text(encoding="utf-8").replace("\\\n", " ")
    out = {}
    for macro, policy in POLICIES.items():
        (body,) = re.findall(rf"#define {macro}\(_\)(.*)", text)
        out |= {".".join(name.split(", ")): policy for name in re.findall(r"_\(([\w, ]+)\)", body)}
    return out


def _as(tensor: Any, dtype: torch.dtype) -> Any:
    castable = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(dtype) if castable else tensor


def _cast(args: tuple[Any, ...], dtype: torch.dtype) -> list[Any]:
    """As a C++ call of gcc evaluates its arguments: from the right."""
    return [tree_map(lambda leaf: _as(leaf, dtype), arg) for arg in reversed(args)][::-1]


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    dtypes = [leaf.dtype for leaf in tree_iter(args) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu")


def _kernel(op: Any, policy: str) -> Callable[..., Any]:
    """What AutocastCUDA does for an op (WrapFunction_ in autocast_mode.h)."""
    places = {argument.name: i for i, argument in enumerate(op._schema.arguments)}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            if policy != "fp32 result":
                dtype = {"fp32": torch.float32}.get(policy) or torch.get_autocast_dtype("cpu")
                return op(*_cast(args, _widest(args) if policy == "promote" else dtype), **kwargs)
            given = kwargs.pop("dtype", None) or (args[places["dtype"]] if len(args) > places["dtype"] else None)
            return op(*args[: places["dtype"]], dtype=given or torch.float32, **kwargs)

    return kernel


@contextlib.contextmanager
def cuda_lists_on_the_cpu() -> Iterator[None]:
    """CPU tensors are cast as `torch.autocast("cuda")` casts CUDA tensors."""
    enabled = torch.is_autocast_enabled
    with torch.library._scoped_library("aten", "IMPL") as library, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch, "is_autocast_enabled", lambda device_type="cpu": enabled(device_type)
        )  # CUDA, if not asked
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden
            _register(library)
        yield


def _register(library: torch.library.Library) -> None:
    on_cpu = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    on_cuda = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    for name in on_cpu:
        if name not in on_cuda:
            library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True)
    for name, policy in cuda_lists().items():
        if policy == "lower precision" and f"aten::{name}" in on_cpu:
            continue
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(f"aten::{name}", _kernel(op, policy), "AutocastCPU", allow_override=True)


CUDA = 1
"""c10::DeviceType::CUDA"""


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Fake tensors on "cuda" have autograd's forward and autocast, in a build of torch without CUDA too.

    Autograd asks for the device's guard. FakeTensorMode installs one that does nothing where the guard that is there counts
    no devices (ensureCUDADeviceGuardSet, c10/core/impl/DeviceGuardImplInterface.cpp), but a build without CUDA has none. So
    there is one that counts none, until the mode has replaced it. Backward does not run: it asks for CUDA's streams.
    """
    with contextlib.ExitStack() as stack:
        if not torch.backends.cuda.is_built():
            stack.enter_context(_guard_that_counts_no_devices())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        yield


@contextlib.contextmanager
def _guard_that_counts_no_devices() -> Iterator[None]:
    libraries = Path(torch.__file__).parent / "lib"
    (path,) = [path for path in libraries.iterdir() if path.stem == "libc10"]
    registry = (ctypes.c_void_p * (CUDA + 1)).in_dll(ctypes.CDLL(path), "_ZN3c104impl26device_guard_impl_registryE")
    zero = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda this: 0)
    virtual_methods = (ctypes.c_void_p * 64)(*[ctypes.cast(zero, ctypes.c_void_p).value] * 64)
    guard = ctypes.c_void_p(ctypes.addressof(virtual_methods))
    registry[CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    assert registry[CUDA] != ctypes.addressof(guard)
    yield
    registry[CUDA] = None
