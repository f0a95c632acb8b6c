# pyright: basic
"""The places of DeepSpeed's tensors under offload: the GPU or the host, while to torch all are on the CPU.

The host is "cpu", and the GPU is "cpu:0", which torch takes for the CPU too: DeepSpeed has the GPU's name from its accelerator
or from a tensor, and both are answered here. A tensor that is made for the host, pinned, or computed from the host's tensors
is the host's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

GPU: Final = "cpu:0"
"""The name of the GPU in DeepSpeed's accelerator."""
_DEVICE_OF: Final[Any] = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_CPU: Final = torch.Tensor.cpu
PAGED: Final = "paged"
PINNED: Final = "pinned"


class _NameOfGPU(str):
    """The GPU's name without its number, which torch takes for the CPU's name."""


class Places(TorchFunctionMode):
    """A mode that knows the host's storages."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[int, str] = {}
        """A storage of the host -> paged or pinned."""
        self.making: str | None = None
        """The kind of host memory that the running function makes tensors in; None: on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE_OF:
            return torch.device("cpu") if self.is_of_host(args[0]) else torch.device(GPU)
        if func is torch.Tensor.register_post_accumulate_grad_hook:
            tensor, hook = args
            return func(tensor, self._known_in(hook))
        before, self.making = self.making, self._place(func, args, kwargs)
        try:
            if func == _CPU:
                func, args = torch.Tensor.to, (args[0], torch.device("cpu"))
            if func is torch.Tensor.to:
                args, kwargs = self._moved(args, kwargs)
            return func(*args, **kwargs)
        finally:
            self.making = before

    def _known_in(self, hook: Any) -> Any:
        """Return a hook in which places are known, as autograd runs hooks without modes for functions."""

        def inside(tensor: torch.Tensor) -> Any:
            with self:
                return hook(tensor)

        return inside

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a pinned copy of a tensor."""
        self.making = PINNED
        try:
            with torch._C.DisableTorchFunction():
                return tensor.detach().clone()
        finally:
            self.making = None

    def pinned_empty(self, like: torch.Tensor, shape: Any) -> torch.Tensor:
        """Return a pinned block."""
        self.making = PINNED
        try:
            with torch._C.DisableTorchFunction():
                return torch.empty(shape, dtype=like.dtype)
        finally:
            self.making = None

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.kinds.get(tensor.untyped_storage()._cdata) == PINNED

    def is_of_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.kinds

    def takes(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is the host's, and note it if it is new."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.kinds or self.making is None:
            return storage._cdata in self.kinds
        self.kinds[storage._cdata] = self.making
        weakref.finalize(storage, self.kinds.pop, storage._cdata, None).atexit = False
        return True

    def _place(self, func: Any, args: Any, kwargs: Any) -> str | None:
        named = _device(func, args, kwargs)
        if named is not None:
            return PAGED if named.index is None else None
        of_host = any(isinstance(t, torch.Tensor) and self.is_of_host(t) for t in tree_iter((args, kwargs)))
        return PAGED if of_host else None

    def _moved(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of `to` with the CPU as their device. A tensor that changes its place is copied."""
        named = _device(torch.Tensor.to, args, kwargs)
        if named is None:
            return args, kwargs
        args = tuple(torch.device("cpu") if _as_device(a) is not None else a for a in args)
        kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
        return args, kwargs | ({"copy": True} if (named.index is None) is not self.is_of_host(args[0]) else {})


def _device(func: Any, args: Any, kwargs: Any) -> torch.device | None:
    """Return the device of the CPU that a call names; None if it names none."""
    if func == _CPU:
        return torch.device("cpu")
    named = _as_device(kwargs.get("device"))
    if named is None and func is torch.Tensor.to:
        named = next((d for d in map(_as_device, args[1:]) if d is not None), None)
    return named


def _as_device(value: Any) -> torch.device | None:
    """Return the device that a value names, a member of DeepSpeed's enumeration too; None for another value, and for the
    device of shapes."""
    if isinstance(value, _NameOfGPU):
        return torch.device(GPU)
    if isinstance(value, str):
        value = torch.device(str(getattr(value, "value", value)))
    return value if isinstance(value, torch.device) and value.type == "cpu" else None


@contextlib.contextmanager
def known_in_backward(places: Places) -> Iterator[None]:
    """Let places be known where ZeRO-3's modules call the engine within a block, in backward too: autograd runs these without
    modes for functions."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    own: Any = DeepSpeedZeRoOffload
    names = tuple(f"{when}_sub_module_{way}_function" for when in ("pre", "post") for way in ("forward", "backward"))
    before = {name: getattr(own, name) for name in names}

    def inside(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            with places:
                return function(*args, **kwargs)

        return called

    for name, function in before.items():
        setattr(own, name, inside(function))
    checks: Any = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    check = checks["default"]
    checks["default"] = lambda tensor: {
        k: v for k, v in check(tensor).items() if k != "device"
    }  # two names of one device
    try:
        yield
    finally:
        checks["default"] = check
        for name, function in before.items():
            setattr(own, name, function)


def like_cuda_beside(places: Places, base: Any) -> Any:
    """Return an accelerator of the class `base`, which answers as CUDA's, beside a host whose tensors `places` knows."""

    class BesideHost(base):
        def current_device_name(self) -> str:
            return GPU

        def device_name(self, device_index: Any = None) -> str:
            return _NameOfGPU("cpu") if device_index is None else GPU

        def pin_memory(self, tensor: Any, make_copy: bool = True, match_shape: bool = True) -> Any:
            if make_copy:
                return places.pinned(tensor)
            return places.pinned_empty(tensor, tensor.shape if match_shape else (tensor.numel(),))

        def pin_empty(self, *size: Any, dtype: Any, device: str = "cpu") -> Any:
            return places.pinned_empty(torch.empty(0, dtype=dtype), size)

        def pin_empty_like(self, tensor: Any, device: str = "cpu", dtype: Any = None) -> Any:
            return places.pinned_empty(torch.empty(0, dtype=dtype or tensor.dtype), tensor.shape)

        def is_pinned(self, tensor: Any) -> bool:
            return places.is_pinned(tensor)

        def on_accelerator(self, tensor: Any) -> bool:
            return not places.is_of_host(tensor)

    own = BesideHost()
    own.cpu_adam = SimpleNamespace(  # its kernel allocates nothing
        load=lambda: SimpleNamespace(
            create_adam=lambda *_: None, destroy_adam=lambda *_: None, adam_update=lambda *_: None
        )
    )
    return own
