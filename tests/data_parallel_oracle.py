"""What torch.nn.DataParallel really allocates on its first GPU, and sends: its own forward, `replicate`, `scatter`, `gather` and
their autograd functions, over CPU tensors that a dispatch mode tells apart by GPU.

Three things stand in. The functions of csrc/cuda/comm.cpp (broadcast_coalesced, scatter, gather) are written out after their
source. `reduce_add` makes its result as it does with NCCL. `parallel_apply` runs one replica after the other, in place of a
thread for each. The autograd functions are compiled from torch's own file, in which CPU tensors are allowed.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from oracle import LiveBytes, build, cuda_kernels, not_traced
from per_op import CHECKPOINTS
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DataParallel, _functions, comm, scatter_gather
from torch.utils._pytree import tree_iter

from memcalc.validate.untouched import Untouched

replicating = sys.modules["torch.nn.parallel.replicate"]
BUFFER = 10 * 2**20


class FirstGpu(LiveBytes):
    """Live bytes of the first GPU. Ops over tensors of others, and those of a replica on another, are elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.gpu = 0
        self.elsewhere: set[int] = set()
        self.sent: list[tuple[str, int]] = []
        self.here = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.here = self.gpu == 0 and not any(t.untyped_storage()._cdata in self.elsewhere for t in given)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def register(self, tensor: torch.Tensor) -> int:
        if self.here:
            return super().register(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen and key not in self.elsewhere:
            self.elsewhere.add(key)
            weakref.finalize(storage, self.elsewhere.discard, key).atexit = False
        return 0

    @contextlib.contextmanager
    def on(self, gpu: int) -> Iterator[None]:
        before, self.gpu = self.gpu, gpu
        yield
        self.gpu = before


@dataclass
class Replicated:
    """Bytes of the first GPU in the second step, and what was sent."""

    resident: int
    forward_end: int
    forward: int
    backward: int
    step: int
    gradients: int
    sent: list[tuple[str, int]]
    outputs: list[str]
    """The tensors of the model's output."""


class Sequential(DataParallel):
    """DataParallel over CPU tensors. Its constructor would look for GPUs."""

    def __init__(self, module: Any, gpus: int, mode: FirstGpu) -> None:
        torch.nn.Module.__init__(self)
        self.module, self.dim, self.output_device = module, 0, 0
        self.device_ids, self.src_device_obj = list(range(gpus)), torch.device("cpu")
        self.mode = mode

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        outputs = []
        for gpu, (replica, given, named) in enumerate(zip(replicas, inputs, kwargs, strict=True)):
            with self.mode.on(gpu):
                outputs.append(replica(*given, **named))
        return outputs


@contextlib.contextmanager
def stand_ins(mode: FirstGpu) -> Iterator[None]:
    def broadcast_coalesced(tensors: Any, devices: list[int], buffer_size: int = BUFFER) -> list[list[torch.Tensor]]:
        outputs = [list(tensors), *([] for _ in devices[1:])]
        for chunk in chunks_of(tensors, buffer_size):
            flat = chunk[0].contiguous().view(-1) if len(chunk) == 1 else _flatten_dense_tensors(chunk)
            mode.sent.append(("broadcast", flat.nbytes))
            for gpu in devices[1:]:
                with mode.on(gpu):
                    copy = torch.empty_like(flat)
                    outputs[gpu] += [t.data for t in _unflatten_dense_tensors(copy, chunk)]
            del flat  # in C++ it is the loop's own
        return outputs

    def scatter(tensor: Any, devices: list[int], sizes: Any, dim: int, streams: Any) -> tuple[torch.Tensor, ...]:
        parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(list(sizes), dim)
        out = []
        for gpu, part in enumerate(parts):
            with mode.on(gpu):
                out.append(part if gpu == 0 else torch.empty_like(part))
            if gpu:
                mode.sent.append(("send", part.nbytes))
        return tuple(out)

    def gather(tensors: Any, dim: int, destination: int) -> torch.Tensor:
        shape = list(tensors[0].shape)
        shape[dim] = sum(t.shape[dim] for t in tensors)
        mode.sent += [("send", t.nbytes) for t in tensors[1:]]
        return torch.empty(shape, dtype=tensors[0].dtype)

    def reduce_add(inputs: Any, destination: int) -> torch.Tensor:
        mode.sent.append(("reduce", inputs[0].nbytes))
        return torch.empty_like(inputs[0])

    own = types.ModuleType("functions_of_data_parallel")
    source = inspect.getsource(_functions).replace('!= "cpu"', '!= "none"')
    exec(compile(source, own.__name__, "exec"), own.__dict__)
    with contextlib.ExitStack() as stack:
        for name, function in (("broadcast_coalesced", broadcast_coalesced), ("scatter", scatter), ("gather", gather)):
            stack.enter_context(patch.object(comm, name, function))
        stack.enter_context(patch.object(comm, "reduce_add", reduce_add))
        for module in (_functions, scatter_gather):
            for name in ("Broadcast", "Gather", "Scatter"):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, getattr(own, name)))
        yield


def chunks_of(tensors: Any, limit: int) -> list[list[torch.Tensor]]:
    """take_tensors of csrc/utils/tensor_flatten.cpp: by dtype."""
    out: list[list[torch.Tensor]] = []
    groups: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        own, size = groups.get(tensor.dtype, ([], 0))
        own, size = [*own, tensor], size + tensor.nbytes
        if size + tensor.nbytes >= limit:
            out.append(own)
            own, size = [], 0
        groups[tensor.dtype] = own, size
    return [*out, *(own for own, _ in groups.values() if own)]


def replicated_step(
    config: dict[str, Any],
    *,
    gpus: int,
    micro_batch_size: int,
    seq_len: int,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    implementation: str = "fused",
    clips: bool = False,
) -> Replicated:
    mode = FirstGpu()
    with contextlib.ExitStack() as stack:
        for context in (Untouched(), not_traced(), cuda_kernels(), stand_ins(mode)):
            stack.enter_context(context)
        model = build(config, attention, dtype)
        if recompute:
            model.gradient_checkpointing_enable(CHECKPOINTS["full"])
        replicas = Sequential(model, gpus, mode)
        optimizer = torch.optim.AdamW(model.parameters(), **{implementation: True})
        ids = torch.zeros((gpus * micro_batch_size, seq_len), dtype=torch.int64)
        for tensor in (ids, *model.parameters(), *model.buffers()):
            mode.register(tensor)
        loss: Any = None
        with mode:
            for _ in range(2):
                gc.collect()
                mode.sent = []
                resident = mode.now
                mode.begin()
                out = replicas(input_ids=ids, labels=ids)
                outputs = [name for name, value in out.items() if value is not None]
                loss = out.loss.mean()
                del out
                gc.collect()
                forward, end = mode.highest, mode.now
                mode.begin()
                loss.backward()
                backward = mode.highest
                mode.begin()
                gradients = sum(
                    {
                        p.grad.untyped_storage()._cdata: p.grad.untyped_storage().nbytes() for p in model.parameters()
                    }.values()
                )
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return Replicated(resident, end, forward, backward, mode.highest, gradients, mode.sent, outputs)
