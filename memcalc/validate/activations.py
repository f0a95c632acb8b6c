# pyright: basic
"""Activations on the host: TRL's own OffloadActivations around a step.

A machine without a GPU has no streams and no pinned memory. The class finds stand-ins for torch's streams and events, and its
copies on the host are objects with a shape. Storages are told apart by numbers that are used once, as addresses are not.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch

from memcalc.validate.trainers import import_of_trl

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup
    from memcalc.validate.reference import Around


class Copy(NamedTuple):
    """A copy of a tensor between the GPU and the host."""

    nbytes: int
    back: bool


class _OnHost:
    """A tensor of pinned memory."""

    def __init__(self, shape: Any, dtype: torch.dtype, copies: list[Copy]) -> None:
        self.shape, self.dtype, self.copies = torch.Size(shape), dtype, copies

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def copy_(self, tensor: torch.Tensor, non_blocking: bool) -> None:
        self.copies.append(Copy(self.nbytes, back=False))

    def to(self, device: str, non_blocking: bool) -> torch.Tensor:
        self.copies.append(Copy(self.nbytes, back=True))
        return torch.empty(self.shape, dtype=self.dtype)


class _Stream:
    """A stream. Nothing waits."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self) -> None: ...

    def synchronize(self) -> None: ...


class _Torch:
    """torch, as the class finds it on a machine whose GPU is the CPU."""

    def __init__(self, copies: list[Copy]) -> None:
        self.copies = copies
        self.accelerator = SimpleNamespace(current_accelerator=lambda: SimpleNamespace(type="cpu"))
        self.stream = _Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def get_device_module(self, device: str) -> Any:
        return SimpleNamespace(
            Stream=_Stream,
            current_stream=lambda: self.stream,
            stream=lambda _: contextlib.nullcontext(),
            empty_cache=lambda: None,
        )

    def empty_like(self, tensor: torch.Tensor, pin_memory: bool, device: str) -> _OnHost:
        return _OnHost(tensor.shape, tensor.dtype, self.copies)

    def empty(self, size: int, dtype: torch.dtype, pin_memory: bool, device: str) -> _OnHost:
        return _OnHost((size,), dtype, self.copies)


class _Numbers:
    """A number for each storage, used once."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.count = itertools.count()

    def key(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self.known:
            self.known[place] = next(self.count)
            weakref.finalize(storage, self.known.pop, place, None).atexit = False
        return self.known[place], tensor.storage_offset(), tensor.dtype


@contextlib.contextmanager
def moved_to_the_host() -> Iterator[list[Copy]]:
    """Let TRL's class run without a GPU within a block. Yields a list that its copies are put into. Raises InputError without
    TRL."""
    trl = import_of_trl("trl.models.activation_offloading", "--offload-activations")
    copies: list[Copy] = []
    with (
        patch.object(trl, "torch", _Torch(copies)),
        patch.object(trl, "_get_unique_tensor_key", _Numbers().key),
        patch.object(trl, "psutil", SimpleNamespace(virtual_memory=lambda: SimpleNamespace(percent=0.0))),
        patch.object(torch.Tensor, "record_stream", lambda *_: None),
    ):
        yield copies


def around(setup: Setup, model: Any, inner: Around, stack: contextlib.ExitStack) -> Around:
    """Return the context of micro-batches whose saved tensors move to the host, if the setup's do; else `inner`. The class finds
    the head of a model that peft has not wrapped."""
    if setup.offload_activations == "none":
        return inner
    copies = stack.enter_context(moved_to_the_host())
    trl = import_of_trl("trl.models.activation_offloading", "--offload-activations")
    adapters = None if hasattr(model, "get_base_model") else vars(model).pop("peft_config", None)
    moving = trl.get_act_offloading_ctx_manager(model=model)
    if adapters is not None:
        model.peft_config = adapters

    @contextlib.contextmanager
    def micro_batch(follows: bool) -> Iterator[None]:
        del copies[:]
        with inner(follows), moving:
            yield

    return micro_batch
