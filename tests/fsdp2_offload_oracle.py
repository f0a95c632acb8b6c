"""What FSDP2 really has on the GPU and on the host under `CPUOffloadPolicy`: `fully_shard` around transformers' model on CPU
tensors, of which `PlacesOnce` knows which are the host's. FSDP2's own device is the stand-in of a GPU."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from fsdp2_oracle import POLICIES, RankMode, layers, ranks, resizing
from oracle import build, cuda_kernels, not_traced
from param_offload_oracle import Moved, PlacesOnce
from per_op import CHECKPOINTS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from memcalc.validate.host import GPU, PINNED


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


class Mode(RankMode):
    """Live bytes of the GPU, resized storages included; those of the host; what is copied and what is sent."""

    def __init__(self, places: PlacesOfTorch) -> None:
        super().__init__()
        self.places = places
        self.host: Counter[str] = Counter()
        self.most_host: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()

    def register(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen or tensor.device.type == "meta" or not self.places.takes(tensor):
            return super().register(tensor)
        self._seen.add(storage._cdata)
        kind, nbytes = self.places.kinds[storage._cdata], storage.nbytes()
        self.host[kind] += nbytes
        self.most_host[kind] = max(self.most_host[kind], self.host[kind])
        weakref.finalize(storage, self._leaves, storage._cdata, kind, nbytes).atexit = False
        return 0

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Count a tensor of a mesh never: it is the host's."""
        self._seen.add(tensor.untyped_storage()._cdata)

    def _leaves(self, key: int, kind: str, nbytes: int) -> None:
        self.host[kind] -= nbytes
        self._seen.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::_to_copy" and not any(issubclass(t, DTensor) for t in types):
            into = self.places.making is not None
            if into is not self.places.is_of_host(args[0]):
                self.copied["to the host" if into else "to the GPU"] += args[0].nbytes
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def known_in_hooks(places: PlacesOfTorch) -> Iterator[None]:
    """Places are known where hooks call FSDP2 in backward: autograd runs these without modes for functions."""
    own: Any = FSDPParamGroup

    def inside(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            with places:
                return function(*args, **kwargs)

        return called

    names = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(own, name, inside(getattr(own, name))))
        yield


def fsdp2_offload_step(
    config: dict[str, Any],
    *,
    mesh: tuple[int, ...],
    seq_len: int = 16,
    dtype: torch.dtype = torch.float32,
    policy: torch.dtype | None = torch.bfloat16,
    reshards: bool | None = None,
    recompute: bool = False,
    micro_batches: int = 1,
    syncs: bool = True,
    clips: bool = False,
    rank: int = 0,
    frozen: tuple[str, ...] = (),
) -> Moved:
    """The second step of the reference step with every layer, then the model, under `fully_shard`."""
    places = PlacesOfTorch()
    mode = Mode(places)
    names = ("dp_replicate", "dp_shard")[-len(mesh) :]
    with contextlib.ExitStack() as stack:
        stack.enter_context(ranks(prod(mesh), rank))
        for context in (not_traced(), cuda_kernels(), resizing(mode), known_in_hooks(places)):
            stack.enter_context(context)
        stack.enter_context(patch.object(_fully_shard, "_get_device_from_mesh", lambda _: torch.device(GPU)))
        whole = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        mode.leave_out(whole._rank_map)
        how: dict[str, Any] = {
            "mesh": whole, "mp_policy": POLICIES[policy],
            "offload_policy": CPUOffloadPolicy(), "reshard_after_forward": reshards,
        }  # fmt: skip
        model = build(config, "sdpa", dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen or ("nothing",)))
        if recompute:
            model.gradient_checkpointing_enable(CHECKPOINTS["full"])
        ids = torch.zeros((1, seq_len), dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        with mode, places:
            for tensor in [*batch.values(), *model.parameters(), *model.buffers()]:
                mode.register(tensor)
            del tensor, parameter
            for layer in layers(model):
                fully_shard(layer, **how)
            fully_shard(model, **how)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            result = None
            for _ in range(2):
                result = _step(mode, model, optimizer, batch, micro_batches, syncs=syncs, clips=clips)
    assert result is not None
    return result


def _step(mode: Mode, model: Any, optimizer: Any, batch: Any, micro_batches: int, *, syncs: bool, clips: bool) -> Moved:
    gc.collect()
    host = {k: n for k, n in mode.host.items() if n}
    mode.sent, mode.copied, mode.most_host = [], Counter(), Counter(mode.host)
    phases = {"forward": 0, "backward": 0, "step": 0}
    copied: Counter[tuple[str, str]] = Counter()

    def ends(phase: str) -> None:
        phases[phase] = max(phases[phase], mode.highest)
        copied.update({(phase, way): n for way, n in mode.copied.items()})
        mode.copied = Counter()

    for i in range(micro_batches):
        model.set_requires_gradient_sync(syncs or i == micro_batches - 1)
        mode.phase = "forward"
        mode.begin()
        mode.loss = model(**batch).loss
        gc.collect()
        ends("forward")
        mode.phase = "backward"
        mode.begin()
        mode.loss.backward()
        ends("backward")
    mode.phase = "step"
    mode.begin()
    if clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    most = {k: n for k, n in mode.most_host.items() if n}
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    ends("step")
    sent = Counter((name, "", nbytes) for name, nbytes, _ in mode.sent)
    return Moved(phases, host, most, dict(copied), sent)
