"""Fake tensors on "cuda" under torch's own CUDA autocast, which `memcalc.validate.autocast` is held against."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memcalc.validate.autocast import cuda_lists, cuda_lists_on_the_cpu

__all__ = ["cuda_lists", "cuda_lists_on_the_cpu", "fake_cuda"]

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
