# pyright: basic
"""Places of tensors, as `host.py` knows them, where FSDP2's CPUOffloadPolicy or ZeRO-3 keeps weights on the host, or in files.

FSDP2 asks its mesh for the device, and is told a name of the CPU that stands for the GPU. DeepSpeed's files are kept in no
memory: a stand-in for its handle of asynchronous IO notes their lengths.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
from torch.overrides import _get_current_function_mode_stack

from memcalc.engines.deepspeed.zero_optimizer import has_fused_adam
from memcalc.validate import deepspeed
from memcalc.validate.host import GPU, PAGED, PINNED, Places
from memcalc.validate.optimizers import make
from memcalc.validate.reference import nbytes

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup
    from memcalc.validate.reference import Enter

_BUILDERS: Final = ("partitioned_optimizer_swapper", "pipelined_optimizer_swapper", "partitioned_param_swapper")


class PlacesOnce(Places):
    """Places that are known once, however often they are entered. A mode for functions that is entered again takes each move
    twice, the second time as one to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[bool] = []

    def __enter__(self) -> PlacesOnce:
        self.entered.append(self not in _get_current_function_mode_stack())
        if self.entered[-1]:
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.entered.pop():
            super().__exit__(*error)


class PlacesOfTorch(PlacesOnce):
    """Places of torch's own calls: `pin_memory()`, and a copy to the host without waiting, which torch makes in pinned memory
    (aten/src/ATen/native/TensorConversions.cpp, _to_copy)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return self.pinned(args[0])
        if func is torch.Tensor.is_pinned:
            return self.is_pinned(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def is_of_host(self, tensor: torch.Tensor) -> bool:
        return super().is_of_host(getattr(tensor, "_local_tensor", tensor))

    def _place(self, func: Any, args: Any, kwargs: Any) -> str | None:
        place = super()._place(func, args, kwargs)
        leaves = func is torch.Tensor.to and place is not None and not self.is_of_host(args[0])
        return PINNED if leaves and kwargs.get("non_blocking") else place


class PlacesOfNumbers(PlacesOnce):
    """A tensor made of numbers, and an empty one of one element, are the host's if no device is named, as in torch."""

    def _place(self, func: Any, args: Any, kwargs: Any) -> str | None:
        of_number = func is torch.tensor or (func is torch.empty and args == (1,))
        return PAGED if of_number and "device" not in kwargs else super()._place(func, args, kwargs)


def places_of(setup: Setup) -> Places | None:
    """Return the places of a setup's tensors; None if all are on the GPU."""
    if not setup.offloads:
        return None
    if setup.engine == "fsdp2":
        return PlacesOfTorch()
    if "nvme" in (setup.offload_optimizer, setup.offload_params):
        return PlacesOfNumbers()
    return Places() if setup.offload_params == "none" else PlacesOnce()


# --- FSDP2


@contextlib.contextmanager
def fsdp2_beside_the_host(places: Places) -> Iterator[None]:
    """Let FSDP2 take the CPU for the GPU, and know places where hooks call it in backward, within a block: autograd runs these
    without modes for functions."""
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    own: Any = FSDPParamGroup

    def inside(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            with places:
                return function(*args, **kwargs)

        return called

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(_fully_shard, "_get_device_from_mesh", lambda _: torch.device(GPU)))
        for name in ("unshard", "wait_for_unshard", "post_backward", "finalize_backward"):
            stack.enter_context(patch.object(own, name, inside(getattr(own, name))))
        yield


class SeesGradients:
    """An optimizer that notes, when it steps, the bytes of the gradients that are on the GPU."""

    def __init__(self, optimizer: Any, parameters: list[Any], places: Places) -> None:
        self.optimizer, self.parameters, self.places = optimizer, parameters, places
        self.on_the_gpu = 0

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.on_the_gpu = nbytes(one for one in gradients if not self.places.is_of_host(one))
        del gradients
        self.optimizer.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def counted(self, step: Callable[[Enter], int]) -> Callable[[Enter], int]:
        """Return the step, which then returns what was noted."""

        def call(enter: Enter) -> int:
            step(enter)
            return self.on_the_gpu

        return call


# --- files of DeepSpeed


def _handle_of(files: dict[str, int], places: Places) -> Any:
    """Return a class like DeepSpeed's aio_handle (csrc/aio/py_lib): what is asked for has happened when `wait` is called."""

    class Handle:
        def __init__(self, **_: Any) -> None:
            self.pending = 0

        def new_cpu_locked_tensor(self, elements: int, like: Any) -> Any:
            return places.pinned_empty(like, (elements,))

        def free_cpu_locked_tensor(self, _: Any) -> bool:
            return True

        def is_pinned(self, tensor: Any) -> bool:
            return places.is_pinned(tensor)

        def async_pread(self, buffer: Any, path: str, _: int) -> int:
            assert files[path] == buffer.numel() * buffer.element_size(), path
            self.pending += 1
            return 0

        def async_pwrite(self, buffer: Any, path: str, _: int) -> int:
            assert places.is_pinned(buffer), path
            files[path] = buffer.numel() * buffer.element_size()
            self.pending += 1
            return 0

        def wait(self) -> int:
            done, self.pending = self.pending, 0
            return done

    return Handle


@contextlib.contextmanager
def beside_files(places: Places) -> Iterator[None]:
    """Let DeepSpeed's swappers find the stand-in within a block."""
    deepspeed.load()
    files: dict[str, int] = {}
    builder = lambda: SimpleNamespace(load=lambda **_: SimpleNamespace(aio_handle=_handle_of(files, places)))  # noqa: E731
    with contextlib.ExitStack() as stack:
        for name in _BUILDERS:
            stack.enter_context(patch(f"deepspeed.runtime.swap_tensor.{name}.AsyncIOBuilder", builder))
        yield


def configuration(setup: Setup, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Return the ds_config of a setup with files, whose folder lasts as long as `stack`."""
    config = deepspeed.configuration(setup)
    path = {"nvme_path": stack.enter_context(tempfile.TemporaryDirectory())}
    of_optimizer = _given(buffer_count=setup.nvme_optimizer_buffer_count)
    of_params = _given(
        buffer_count=setup.nvme_buffer_count, buffer_size=setup.nvme_buffer_size, max_in_cpu=setup.nvme_max_in_cpu
    )
    zero = config["zero_optimization"]
    for name, own in (("offload_optimizer", of_optimizer), ("offload_param", of_params)):
        if name in zero and zero[name]["device"] == "nvme":
            zero[name] |= {**path, **own}
    threads = _given(intra_op_parallelism=setup.nvme_threads)
    return config | ({"aio": threads} if threads else {})


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def engine_of(setup: Setup, module: Any, stack: contextlib.ExitStack) -> Any:
    """Return DeepSpeed's engine around a module that trains, until `stack` ends."""
    own = None if has_fused_adam(setup) else make(setup, [list(deepspeed._trained(module))])
    engine, *_ = deepspeed.load().initialize(
        model=module,
        optimizer=own,
        model_parameters=deepspeed._trained(module),
        config=configuration(setup, stack),
        dist_init_required=False,
    )
    stack.callback(engine.destroy)
    return engine
