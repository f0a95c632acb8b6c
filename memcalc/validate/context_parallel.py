# pyright: basic
"""Sequences shared by ranks in torch's `context_parallel`, as transformers' Trainer and accelerate run it. The batch is
input_ids, labels, shift_labels and position_ids, which are cut in place, and attention gets no mask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ROTATES = {"all_gather": "allgather", "p2p": "alltoall"}
"""--cp-comm-type -> torch's name."""


def without_masks(model: torch.nn.Module) -> None:
    """Change a model as accelerate's `prepare` does (big_modeling.py, _attach_context_parallel_hooks): the attention
    gets no mask and is causal."""

    def without(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "attention_mask" in kwargs:
            kwargs["attention_mask"], kwargs["is_causal"] = None, True
        return args, kwargs

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(without, with_kwargs=True, prepend=True)


@contextlib.contextmanager
def shared_sequence(mesh: Any, batch: dict[str, torch.Tensor], rotate: str) -> Iterator[None]:
    """Run accelerate's `maybe_context_parallel` over the batch of transformers' Trainer, around a block."""
    with shared_tensors(mesh, list(batch.values()), [], rotate):
        yield


@contextlib.contextmanager
def shared_tensors(mesh: Any, batch: list[torch.Tensor], kept: list[torch.Tensor], rotate: str) -> Iterator[None]:
    """Run torch's context around a block, over the batch and over the tensors that are restored when it ends."""
    set_rotate_method(rotate)
    buffers = [*batch, *kept]
    dims = [1] * len(buffers)
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(batch)):
        yield


def whole_sequences(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return the batch that Trainer gives a step in the context."""
    names = ("input_ids", "labels", "shift_labels", "position_ids")
    return {name: torch.zeros(shape, dtype=torch.int64) for name in names}


def refill(batch: dict[str, torch.Tensor], shape: tuple[int, int]) -> None:
    """Fill a cut batch again. It gets its former size: the storages were never shrunk."""
    for name, tensor in batch.items():
        tensor.resize_(shape)
        tensor.copy_(torch.arange(shape[1]) if name == "position_ids" else torch.zeros(()))


@contextlib.contextmanager
def micro_batch(
    mesh: DeviceMesh, batch: dict[str, torch.Tensor], shape: tuple[int, int], rotate: str
) -> Iterator[None]:
    """Fill the batch again, and run the context of its forward and backward around a block."""
    refill(batch, shape)
    with shared_sequence(mesh, batch, rotate):
        yield


def joined(whole: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a mesh with cp is sharded over: dp and cp as one axis (accelerate's and torchtitan's
    dp_shard_cp)."""
    flat = whole["dp_shard", "cp"]._flatten("dp_shard_cp")
    return whole["dp_replicate", "dp_shard_cp"] if "dp_replicate" in (whole.mesh_dim_names or ()) else flat
