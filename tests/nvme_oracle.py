"""What DeepSpeed's ZeRO-3 really has on the GPU, on the host and in files when it swaps to NVMe: the tensors of two places of
`param_offload_oracle`, and DeepSpeed's own swappers. A stand-in for the handle of asynchronous IO keeps the files in memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from deepspeed_oracle import configuration
from offload_oracle import Sent, TwoPlaces, beside_host
from oracle import build
from param_offload_oracle import PlacesOnce
from per_op import CHECKPOINTS

from memcalc.validate.host import PAGED, Places

BUILDERS = "partitioned_optimizer_swapper", "pipelined_optimizer_swapper", "partitioned_param_swapper"


class PlacesOfNumbers(PlacesOnce):
    """A tensor made of numbers, and an empty one of one element, are the host's if no device is named, as in torch."""

    def _place(self, func: Any, args: Any, kwargs: Any) -> str | None:
        of_number = func is torch.tensor or (func is torch.empty and args == (1,))
        return PAGED if of_number and "device" not in kwargs else super()._place(func, args, kwargs)


class Files:
    """The files of NVMe, by path, and the bytes that go there and back."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.moved: Counter[str] = Counter()

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.content.values()))


def handle_of(files: Files, places: Places) -> Any:
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
            content = files.content[path]
            assert len(content) == buffer.numel() * buffer.element_size(), path
            ctypes.memmove(buffer.data_ptr(), content, len(content))
            files.moved["read"] += len(content)
            self.pending += 1
            return 0

        def async_pwrite(self, buffer: Any, path: str, _: int) -> int:
            assert places.is_pinned(buffer)
            files.content[path] = ctypes.string_at(buffer.data_ptr(), buffer.numel() * buffer.element_size())
            files.moved["written"] += len(files.content[path])
            self.pending += 1
            return 0

        def wait(self) -> int:
            done, self.pending = self.pending, 0
            return done

    return Handle


@contextlib.contextmanager
def beside_files(files: Files, places: Places) -> Iterator[None]:
    builder = lambda: SimpleNamespace(load=lambda **_: SimpleNamespace(aio_handle=handle_of(files, places)))  # noqa: E731
    with contextlib.ExitStack() as stack:
        for name in BUILDERS:
            stack.enter_context(patch(f"deepspeed.runtime.swap_tensor.{name}.AsyncIOBuilder", builder))
        yield


@dataclass
class Swapped:
    """Bytes of a steady step on one rank: the GPU's peak by phase, the host's by kind between steps and at most, those in files,
    and those that are copied between host and GPU, read and written, by phase."""

    phases: dict[str, int]
    host: dict[str, int]
    most_host: dict[str, int]
    files: int
    copied: dict[tuple[str, str], int]
    moved: dict[tuple[str, str], int]
    sent: Sent


def swapped_step(
    config: dict[str, Any],
    *,
    gpus: int,
    optimizer: str = "nvme",
    params: str = "none",
    rank: int = 0,
    precision: str = "bf16",
    seq_len: int = 16,
    micro_batches: int = 1,
    clipping: float = 0.0,
    recompute: bool = False,
    steps: int = 3,
    frozen: tuple[str, ...] = (),
    of_optimizer: dict[str, Any] | None = None,
    of_params: dict[str, Any] | None = None,
    aio: dict[str, Any] | None = None,
    **options: int,
) -> Swapped:
    """`engine(...)`, `engine.backward`, `engine.step`, `steps` times; the last is reported."""
    import deepspeed

    places, files = PlacesOfNumbers(), Files()
    mode = TwoPlaces(places)
    settings = configuration(3, precision, micro_batches, clipping, options) | ({"aio": aio} if aio else {})
    with contextlib.ExitStack() as stack:
        path = {"nvme_path": stack.enter_context(tempfile.TemporaryDirectory())}
        settings["zero_optimization"] |= {
            "offload_optimizer": {"device": optimizer, **path, **(of_optimizer or {})},
            "offload_param": {"device": params, **path, **(of_params or {})},
        }
        stack.enter_context(beside_host(gpus, rank, places))
        stack.enter_context(beside_files(files, places))
        model = build(config, "sdpa", torch.float32)
        if recompute:
            model.gradient_checkpointing_enable(CHECKPOINTS["full"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen or ("nothing",)))
        ids = torch.zeros((1, seq_len), dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        with mode, places:
            for tensor in [*batch.values(), *model.parameters(), *model.buffers()]:
                mode.register(tensor)
            del tensor
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=settings
            )
            result = None
            for _ in range(steps):
                result = _step(mode, files, engine, batch, micro_batches)
        engine.destroy()
    assert result is not None
    return result


def _step(mode: TwoPlaces, files: Files, engine: Any, batch: Any, micro_batches: int) -> Swapped:
    gc.collect()
    host = {k: n for k, n in mode.host.items() if n}
    mode.most_host, mode.sent = Counter(mode.host), Counter()
    phases: dict[str, int] = {}
    copied: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()

    def ends(phase: str) -> None:
        phases[phase] = mode.highest if phase == "step" else max(phases.get(phase, 0), mode.highest)
        copied.update({(phase, way): n for way, n in mode.copied.items()})
        moved.update({(phase, way): n for way, n in files.moved.items()})
        mode.copied, files.moved = Counter(), Counter()

    mode.copied, files.moved = Counter(), Counter()
    for _ in range(micro_batches):
        mode.begin("forward")
        engine.held_loss = engine(**batch).loss
        gc.collect()
        ends("forward")
        mode.begin("backward")
        engine.backward(engine.held_loss)
        ends("backward")
        mode.begin("step")
        engine.step()
        ends("step")
    most = {k: n for k, n in mode.most_host.items() if n}
    return Swapped(phases, host, most, files.nbytes, dict(copied), dict(moved), mode.sent)
