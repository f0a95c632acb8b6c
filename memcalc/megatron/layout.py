"""The part of GPTModel that one rank has."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from memcalc.core.dims import Dim
from memcalc.megatron.layers import (
    TensorParallel,
)


class Layout(NamedTuple):
    """One rank has this part of the model."""

    tensor_parallel: int = 1
    sequence_parallel: bool = False
    context_parallel: int = 1
    cp_comm_type: str | None = None
    """One of context_parallel.ATTENTION; None where there is one rank."""
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    expert_imbalance: float = 1.0
    layers: int = 1
    recompute_layers: int | None = None
    """Of those the first so many, where they are recomputed; None: all."""
    routed: tuple[bool, ...] = ()
    """Of each layer, whether it has experts; empty where none has."""
    first: bool = True
    """Whether the stage has the embedding."""
    last: bool = True
    """Whether it has the head and the loss."""
    selective: bool = False
    fused_loss: bool = False
    fuses_accumulation: bool = True
    """Whether the kernels that make gradients of weights add them to the main gradients."""
    mask_in_batch: bool = True
    """Whether a batch brings an attention mask."""

    def group(self, shard: Dim) -> TensorParallel:
        """The tensor-parallel group, where a tensor between two layers has `shard` tokens of a sequence."""
        return _group(self, shard)


@lru_cache(maxsize=1024)
def _group(layout: Layout, shard: Dim) -> TensorParallel:
    tp, poly = layout.tensor_parallel, shard.poly
    name = "seq" if layout.context_parallel == 1 else "seq/cp"
    if not layout.sequence_parallel:
        whole = Dim(name, shard.size, poly)
        return TensorParallel(tp, False, whole, whole, layout.fuses_accumulation)
    whole = Dim(name, tp * shard.size, tuple(tp * c for c in poly))  # type: ignore[arg-type]
    return TensorParallel(tp, True, whole, Dim(f"{name}/tp", shard.size, poly), layout.fuses_accumulation)


def padded_vocab(vocab: int, tensor_parallel: int, multiple: int = 128) -> int:
    """`--make-vocab-size-divisible-by` times tp (megatron/training/tokenizer/tokenizer.py)."""
    unit = multiple * tensor_parallel
    return -(-vocab // unit) * unit


def part(name: str, size: int, ranks: int) -> Dim:
    """An equal part of a dim."""
    assert size % ranks == 0
    return Dim(name if ranks == 1 else f"{name}/tp", size // ranks)
