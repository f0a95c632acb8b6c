# pyright: basic
"""`torch.autocast` as on CUDA, for traces on the CPU.

The CPU's autocast has other op lists (softmax, layer_norm, pow, rsqrt and sum are not cast; cat and stack are). Here
the dispatcher gets CUDA's lists for CPU tensors. Contexts, the weight cache and the casts of the lower-precision ops in
both lists remain torch's own.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    """Return op (with its overload) -> policy, from the header that torch installs."""
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
    """Cast arguments in the order in which gcc evaluates those of a C++ call: from the right."""
    return [tree_map(lambda leaf: _as(leaf, dtype), arg) for arg in reversed(args)][::-1]


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    dtypes = [leaf.dtype for leaf in tree_iter(args) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu")


_SUM = torch.ops.aten.sum.default


def _kernel(op: Any, policy: str) -> Callable[..., Any]:
    """Return AutocastCUDA's kernel for an op (WrapFunction_ in autocast_mode.h)."""
    places = {argument.name: i for i, argument in enumerate(op._schema.arguments)}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            if policy != "fp32 result":
                dtype = {"fp32": torch.float32}.get(policy) or torch.get_autocast_dtype("cpu")
                return op(*_cast(args, _widest(args) if policy == "promote" else dtype), **kwargs)
            if op is _SUM and not args[0].is_floating_point():  # firstarg_is_eligible: a number of places stays one
                return op(*args, **kwargs)
            given = kwargs.pop("dtype", None) or (args[places["dtype"]] if len(args) > places["dtype"] else None)
            return op(*args[: places["dtype"]], dtype=given or torch.float32, **kwargs)

    return kernel


@contextlib.contextmanager
def cuda_lists_on_the_cpu() -> Iterator[None]:
    """Cast CPU tensors as `torch.autocast("cuda")` casts CUDA tensors, within a block."""
    enabled = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda device_type="cpu": enabled(device_type)  # CUDA, if not asked
    try:
        with torch.library._scoped_library("aten", "IMPL") as library:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about overridden kernels
                _register(library)
            yield
    finally:
        torch.is_autocast_enabled = enabled


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
