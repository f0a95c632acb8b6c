# pyright: basic
"""Sequences shared by several ranks, as DeepSpeed runs transformers' models (Ulysses) and HF Trainer computes the
loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class _OfNccl:
    """torch.distributed with NCCL as its backend's name, so that reductions are scattered, not emulated."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_backend(self, group: Any = None) -> str:
        return dist.Backend.NCCL


@contextlib.contextmanager
def shared_sequences(model: Any, ranks: int, micro_batch_size: int) -> Iterator[Any]:
    """Replace transformers' attention by DeepSpeed's within a block. Yields the `mpu` that `deepspeed.initialize`
    takes; None for a rank alone."""
    if ranks == 1:
        yield None
        return
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind = model.config._attn_implementation
    own = ALL_ATTENTION_FUNCTIONS[kind]
    functional: Any = import_module("torch.distributed.nn.functional")
    functional.dist = _OfNccl()
    deepspeed.init_distributed(auto_mpi_discovery=False)  # its groups are made before its engine
    try:
        yield UlyssesSPAttentionHF.register_with_transformers(model, kind, ranks, micro_batch_size)
    finally:
        functional.dist = dist
        ALL_ATTENTION_FUNCTIONS[kind] = own
        parallel_state_sp._release_sequence_parallel_groups()
        groups.mpu = None


def part_of_batch(batch: int, seq: int, ranks: int, rank: int) -> dict[str, torch.Tensor]:
    """Return what UlyssesSPDataLoaderAdapter hands to one rank, with the labels that Trainer adds."""
    assert not seq % ranks
    own = slice(rank * (seq // ranks), (rank + 1) * (seq // ranks))
    ids = torch.zeros((batch, seq), dtype=torch.int64)
    positions = torch.arange(seq).expand(batch, seq)
    labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[..., 1:]
    parts = {"input_ids": ids, "position_ids": positions, "shift_labels": labels}
    return {name: whole[:, own].clone() for name, whole in parts.items()}


def shared_loss(engine: Any, batch: dict[str, torch.Tensor], ranks: int) -> Any:
    """Return the mean loss over the tokens of all ranks (transformers/integrations/deepspeed.py)."""
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    how = SimpleNamespace(sp_backend="deepspeed", sp_size=ranks)
    return deepspeed_sp_compute_loss(None, engine, dict(batch), False, how)
