# pyright: basic
"""Bytes of live storages, and collectives, as torch's dispatcher sees them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_C10D: Final = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "allgather_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": None,  # counted where it is sent
    "barrier": None,
}
"""Ops of torch.distributed -> collective."""
_FUNCTIONAL: Final = {
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_DEEPSPEED: Final = {"dim_zero_all_to_all": "all_to_all"}
_NO_TRANSFER: Final = ("wait_tensor", "_wrap_tensor_autograd")
STATE: Final = torch.uint64
"""Of the state of dropout's random numbers, of which nothing is counted."""


class Live(TorchDispatchMode):
    """Counts the bytes of all live storages that an op returned while the mode was on, resized ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.highest = 0
        self.calls: dict[tuple[str, int], tuple[int, int]] = {}
        self.numbers_are_ones = False
        """Whether `item()` of a fake tensor is one: optimizers scale by such numbers."""
        self._seen: set[int] = set()

    def begin(self) -> None:
        """A new phase: forget the peak of the last one."""
        self.highest = self.now

    def register(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage from here on."""
        if tensor.device.type == "meta" or tensor.dtype is STATE or isinstance(tensor, AsyncCollectiveTensor):
            return  # a shape alone; what has no part in training; a wrapper of what is already known
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self._add(storage.nbytes())
        weakref.finalize(storage, self._forget, key, storage.nbytes()).atexit = False

    def leave_out(self, tensor: torch.Tensor) -> None:
        """A tensor that is the CPU's on a GPU too, as that of a mesh's ranks is."""
        self._seen.add(tensor.untyped_storage()._cdata)

    def _forget(self, key: int, nbytes: int) -> None:
        self.now -= nbytes
        self._seen.discard(key)

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.highest = max(self.highest, self.now)

    def resize(self, tensor: torch.Tensor, nbytes: int) -> None:
        """FSDP2 frees and refills storages that stay where they are."""
        storage = tensor.untyped_storage()
        more = nbytes - storage.nbytes()
        if more:
            storage.resize_(nbytes)
            if storage._cdata in self._seen:
                self._add(more)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented  # the ops over its local tensor come here by themselves
        if (
            self.numbers_are_ones
            and func is torch.ops.aten._local_scalar_dense.default
            and isinstance(args[0], FakeTensor)
        ):
            return 1.0
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d":
            sizes = [sum(leaf.nbytes for leaf in tree_iter(a) if isinstance(leaf, torch.Tensor)) for a in args[:2]]
            collective = _C10D[name]
            if collective is not None:
                self._call(collective, _ranks(args), max(sizes))
        elif func.namespace == "_c10d_functional" and name not in _NO_TRANSFER:
            ranks = _resolve_process_group(args[-1]).size()
            whole = ranks if name == "all_gather_into_tensor" else 1
            collective = "send" if name == "all_to_all_single" and _to_one(args[2]) else _FUNCTIONAL[name]
            self._call(collective, ranks, args[0].nbytes * whole)
        elif func.namespace == "deepspeed":  # an op with its collective inside
            self._call(_DEEPSPEED[name], _resolve_process_group(args[1]).size(), args[0].nbytes)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor):
                self.register(leaf)
        return out

    def _call(self, collective: str, ranks: int, payload: int) -> None:
        calls, before = self.calls.get((collective, ranks), (0, 0))
        self.calls[collective, ranks] = calls + 1, before + payload


def _to_one(parts: list[int]) -> bool:
    """Whether all of it goes to one rank, as around torch's ring."""
    return sum(n > 0 for n in parts) == 1 < len(parts)


def _ranks(args: tuple[Any, ...]) -> int:
    objects = (a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
    return dist.ProcessGroup.unbox(next(objects)).size()


@contextmanager
def resizing(live: Live) -> Iterator[None]:
    """FSDP2's storages are resized under the eyes of `live`: a dispatch mode does not see it."""
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
