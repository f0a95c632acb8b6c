"""TRL's OffloadActivations, with its own code, around a step of transformers' model: the bytes of the GPU, and what is copied.

A machine without a GPU has no streams and no pinned memory. The class finds stand-ins for torch's streams and events, and its
copies on the host are objects with a shape. Storages are told apart by numbers that are used once, as addresses are not.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from tasks.trl_oracle import import_trl

from memcalc.validate import engines, fake, preference, run
from memcalc.validate.comparison import Comparison

_plain_step, _preference_step = engines.plain_step, preference.preference_step


class Copy(NamedTuple):
    nbytes: int
    back: bool


class _OnHost:
    """A tensor of pinned memory."""

    def __init__(self, shape: Any, dtype: torch.dtype, copies: list[Copy]) -> None:
        self.shape, self.dtype, self.copies = tuple(shape), dtype, copies

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def copy_(self, tensor: torch.Tensor, non_blocking: bool) -> None:
        assert tuple(tensor.shape) == self.shape and non_blocking
        self.copies.append(Copy(self.nbytes, back=False))

    def to(self, device: str, non_blocking: bool) -> torch.Tensor:
        assert device == "cpu" and non_blocking
        self.copies.append(Copy(self.nbytes, back=True))
        return torch.empty(self.shape, dtype=self.dtype)


class _Stream:
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
        assert pin_memory and device == "cpu"
        return _OnHost(tensor.shape, tensor.dtype, self.copies)

    def empty(self, size: int, dtype: torch.dtype, pin_memory: bool, device: str) -> _OnHost:
        assert pin_memory and device == "cpu"
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
def offloading() -> Iterator[list[Copy]]:
    """Run each step of `memcalc validate` within TRL's context. Yields what is copied, of all steps."""
    import_trl()
    from trl.models import activation_offloading as trl

    copies: list[Copy] = []
    contexts: list[Any] = []

    own_build = fake.build

    def build(setup: Any, of: Any, fields: Any) -> Any:
        model = own_build(setup, of, fields)
        adapters = None if hasattr(model, "get_base_model") else vars(model).pop("peft_config", None)
        contexts.append(
            trl.get_act_offloading_ctx_manager(model=model)
        )  # finds the head of a model that peft has not wrapped
        if adapters is not None:
            model.peft_config = adapters
        return model

    def within(around: Callable[[bool], Any]) -> Callable[[bool], Any]:
        @contextlib.contextmanager
        def both(follows: bool) -> Iterator[None]:
            del copies[:]
            with around(follows), contexts[-1]:
                yield

        return both

    def plain_step(setup: Any, model: Any, optimizer: Any, batch: Any, around: Any) -> Any:
        return _plain_step(setup, model, optimizer, batch, within(around))

    def preference_step(setup: Any, models: Any, optimizer: Any, batch: Any, around: Any) -> Any:
        return _preference_step(setup, models, optimizer, batch, within(around))

    with (
        patch.object(fake, "build", build),
        patch.object(fake, "_can_be_fake", lambda setup: False),
        patch.object(engines, "plain_step", plain_step),
        patch.object(preference, "preference_step", preference_step),
        patch.object(trl, "torch", _Torch(copies)),
        patch.object(trl, "_get_unique_tensor_key", _Numbers().key),
        patch.object(trl, "psutil", SimpleNamespace(virtual_memory=lambda: SimpleNamespace(percent=0.0))),
        patch.object(torch.Tensor, "record_stream", lambda *_: None),
    ):
        yield copies


def validate(model: Any, **options: Any) -> tuple[Comparison, list[Copy]]:
    """Return the comparison, and what the last micro-batch has copied."""
    with offloading() as copies:
        return run.validate(model, offload_activations="cpu", **options), copies
