"""What DeepSpeed really has on the GPU and on the host when it offloads: its own engine, as in `deepspeed_oracle`, with
CPU tensors of which `memcalc.validate.host` knows which are the host's.

DeepSpeedCPUAdam is DeepSpeed's own; the kernel that it calls allocates nothing and is left out. Pinned tensors are counted as
tensors, without what torch's allocator of pinned memory rounds up."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from deepspeed_events import played, recorded
from deepspeed_oracle import RankMode, Sent, configuration, ranks
from oracle import build
from per_op import CHECKPOINTS
from records import on_record

import memcalc
from memcalc.validate.deepspeed import like_cuda
from memcalc.validate.host import Places, known_in_backward, like_cuda_beside


class TwoPlaces(RankMode):
    """Live bytes of the GPU; those of the host by kind; and what is copied from one to the other."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places
        self.host: Counter[str] = Counter()
        self.most_host: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()

    def register(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen or tensor.device.type == "meta":
            return 0
        if not self.places.takes(tensor):
            return super().register(tensor)
        self._seen.add(storage._cdata)
        kind, nbytes = self.places.kinds[storage._cdata], storage.nbytes()
        self.host[kind] += nbytes
        self.most_host[kind] = max(self.most_host[kind], self.host[kind])
        weakref.finalize(storage, self._leaves, storage._cdata, kind, nbytes).atexit = False
        return 0

    def _leaves(self, key: int, kind: str, nbytes: int) -> None:
        self.host[kind] -= nbytes
        self._seen.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::copy_", "aten::_to_copy"):
            self._note_copy(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note_copy(self, func: Any, args: Any, kwargs: Any) -> None:
        if func._schema.name == "aten::copy_":
            into, source = self.places.is_of_host(args[0]), args[1]
        else:
            into, source = self.places.making is not None, args[0]
        if into is not self.places.is_of_host(source):
            # Only equal dtypes are copied across: into the GPU what is cast before, to the host what is cast afterwards.
            itemsize = source.itemsize if into else args[0].itemsize
            self.copied["to the host" if into else "to the GPU"] += source.numel() * itemsize


@dataclass
class Offloaded:
    """Bytes of a steady step on one rank: on the GPU, on the host by kind (between steps, and the most), and copied."""

    resident: int
    forward: int
    backward: int
    step: int
    host: dict[str, int]
    most_host: dict[str, int]
    copied: dict[str, int]
    sent: Sent


@contextlib.contextmanager
def beside_host(gpus: int, rank: int, places: Places) -> Iterator[None]:
    from deepspeed.accelerator import set_accelerator
    from deepspeed.ops.adam import cpu_adam

    with ranks(gpus, rank):
        accelerator = like_cuda_beside(places, type(like_cuda()))
        set_accelerator(accelerator)
        with patch.object(cpu_adam, "CPUAdamBuilder", lambda: accelerator.cpu_adam), known_in_backward(places):
            yield


@on_record
def offloaded_step(
    config: dict[str, Any],
    *,
    gpus: int,
    zero: int,
    optimizer: str = "cpu",
    params: str = "none",
    rank: int = 0,
    precision: str = "bf16",
    seq_len: int = 16,
    micro_batches: int = 1,
    clipping: float = 0.0,
    recompute: bool = False,
    steps: int = 2,
    frozen: tuple[str, ...] = (),
    **options: int,
) -> Offloaded:
    """`engine(...)`, `engine.backward`, `engine.step`, `steps` times; the last is reported. `frozen`: beginnings of the names of
    parameters that do not train."""
    import deepspeed

    places = Places()
    mode = TwoPlaces(places)
    settings = configuration(zero, precision, micro_batches, clipping, options)
    settings["zero_optimization"]["offload_optimizer"] = {"device": optimizer}
    settings["zero_optimization"]["offload_param"] = {"device": params}
    with contextlib.ExitStack() as stack:
        stack.enter_context(beside_host(gpus, rank, places))
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
                result = _step(mode, engine, batch, micro_batches)
        engine.destroy()
    assert result is not None
    return result


@on_record
def most_reserved(report: memcalc.Report, rank: int, steps: int) -> int:
    """The bytes that the allocator reserves for a whole process on one rank of the report's setup."""
    return played(recorded(report, rank, steps)).most_reserved


def _step(mode: TwoPlaces, engine: Any, batch: Any, micro_batches: int) -> Offloaded:
    gc.collect()
    resident, host = mode.now, {k: n for k, n in mode.host.items() if n}
    mode.most_host, mode.copied, mode.sent = Counter(mode.host), Counter(), Counter()
    forward = backward = step = 0
    for _ in range(micro_batches):
        mode.begin("forward")
        engine.held_loss = engine(**batch).loss
        gc.collect()
        forward = max(forward, mode.highest)
        mode.begin("backward")
        engine.backward(engine.held_loss)
        backward = max(backward, mode.highest)
        mode.begin("step")
        engine.step()
        step = mode.highest
    most = {k: n for k, n in mode.most_host.items() if n}
    return Offloaded(resident, forward, backward, step, host, most, dict(mode.copied), mode.sent)
