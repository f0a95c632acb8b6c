# pyright: basic
"""The bytes of live storages, as torch's dispatcher sees them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from memcalc.tracing.as_on_cuda import run_as_on_cuda
from memcalc.validate.collectives import has_local_tensors

if TYPE_CHECKING:
    from memcalc.validate.host import Places

DEVICE_OF: Final = torch.ops.prim.device.default

STATE: Final = torch.uint64
"""The dtype of the state of dropout's random numbers, which is not counted."""


class Made(NamedTuple):
    """A storage that was made in forward. Another one may have its address later, but not its number."""

    number: int
    nbytes: int


class Live(TorchDispatchMode):
    """A dispatch mode that counts the bytes of all live storages that an op returned while the mode was on, resized
    ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.highest = 0
        self.numbers_are_ones = False
        """True makes `item()` of a fake tensor one: optimizers scale by such numbers."""
        self._seen: set[int] = set()
        self.in_forward = False
        self.made: dict[int, Made] = {}
        """The live storages that forward has made, by address."""
        self._numbers = itertools.count()
        self.places: Places | None = None
        """The places of tensors, those of the host are not counted; None if all are on the GPU."""

    def on_two_places(self) -> Any:
        """Return a context in which the host's tensors are known, if there are any."""
        return nullcontext() if self.places is None else self.places

    def begin(self) -> None:
        """Begin a new phase: forget the peak of the last one."""
        self.highest = self.now

    def register(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage from here on."""
        if tensor.device.type == "meta" or tensor.dtype is STATE or isinstance(tensor, AsyncCollectiveTensor):
            return  # only a shape; no part of training; a wrapper of a known tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or (self.places is not None and self.places.takes(tensor)):
            return
        self._seen.add(key)
        if self.in_forward:
            self.made[key] = Made(next(self._numbers), storage.nbytes())
        self._add(storage.nbytes())
        weakref.finalize(storage, self._forget, key, storage.nbytes()).atexit = False

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Leave out a tensor that is on the CPU on a GPU machine too, such as a mesh's ranks."""
        self._seen.add(tensor.untyped_storage()._cdata)

    def _forget(self, key: int, nbytes: int) -> None:
        self.now -= nbytes
        self._seen.discard(key)
        self.made.pop(key, None)

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.highest = max(self.highest, self.now)

    def resize(self, tensor: torch.Tensor, nbytes: int) -> None:
        """Resize a storage: FSDP2 frees and refills storages that keep their address."""
        storage = tensor.untyped_storage()
        more = nbytes - storage.nbytes()
        if more:
            storage.resize_(nbytes)
            if storage._cdata in self._seen:
                self._add(more)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # FakeTensorMode's own answer; two of three calls of a backward ask for it
        if has_local_tensors(types):
            return NotImplemented
        if (
            self.numbers_are_ones
            and func is torch.ops.aten._local_scalar_dense.default
            and isinstance(args[0], FakeTensor)
        ):
            return 1.0
        out, temporaries = run_as_on_cuda(func, args, kwargs or {})
        for leaf in tree_iter((out, temporaries)):
            if isinstance(leaf, torch.Tensor):
                self.register(leaf)
        return out


@contextmanager
def whole_shapes_uncounted() -> Iterator[None]:
    """Leave out the fake tensors with which DTensor infers the shapes of whole results: they are nobody's memory.
    DTensor caches an op with its numbers, so it infers again if an optimizer's numbers differ from those of the last
    step."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagator: Any = ShardingPropagator
    own = propagator._propagate_tensor_meta_non_cached

    def look(self: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return own(self, schema)

    propagator._propagate_tensor_meta_non_cached = look
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = own


@contextmanager
def resizing(live: Live) -> Iterator[None]:
    """Let `live` see the resizing of FSDP2's storages within a block: a dispatch mode does not see it."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    group: Any = _fsdp_param_group
    own = _fsdp_param.alloc_storage, _fsdp_param.free_storage
    _fsdp_param.alloc_storage = group.alloc_storage = lambda tensor: live.resize(
        tensor, tensor.numel() * tensor.itemsize
    )
    _fsdp_param.free_storage = lambda tensor: live.resize(tensor, 0)
    try:
        yield
    finally:
        _fsdp_param.alloc_storage, _fsdp_param.free_storage = own
        group.alloc_storage = own[0]
