"""Heads exchanged between neighbours and keys and values sent around a ring of groups (a2a+p2p), against Transformer Engine's
own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kernel_bytes import Arg, Bytes, Kernel, in_torch, on_paper
from transformer_engine_oracle import (
    FusedMode,
    _context_parallel,  # pyright: ignore[reportPrivateUsage]
    _Nothing,  # pyright: ignore[reportPrivateUsage]
    one_rank,
)

import memcalc
from memcalc.core.dims import numel
from memcalc.core.ops.shape import transpose
from memcalc.core.tensor import Memory, Tensor
from memcalc.megatron.context_parallel.ring import exchanged_ring_attention

CASES = [
    # ranks, exchanging, batch, seq/cp, heads, kv_heads, head_dim
    (4, 2, 3, 8, 8, 4, 16),
    (8, 2, 1, 4, 16, 16, 8),
    (8, 4, 2, 8, 8, 8, 16),
    (6, 2, 2, 6, 4, 2, 8),
    (6, 3, 1, 8, 6, 3, 8),
]
Case = tuple[int, int, int, int, int, int, int]


def attention(exchanging: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As oracle's `attention`, with the groups of hierarchical context parallelism."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    first = rank // exchanging * exchanging
    neighbours: Any = dist.new_group(list(range(first, first + exchanging)), backend="fake")
    ring: Any = dist.new_group(list(range(rank % exchanging, ranks, exchanging)), backend="fake")
    seq, lengths = q.shape[0] * ranks, torch.empty(0, dtype=torch.int32)
    return _context_parallel().attn_forward_func_with_cp(
        True, q, k, v, lengths, lengths, seq, seq, None, None, 0.0, [neighbours, ring], list(range(ranks)), _Nothing(),
        "a2a+p2p", qkv_format="sbhd", attn_mask_type="causal", use_fused_attention=True, window_size=(-1, 0),
    )  # fmt: skip


def kernel(case: Case) -> Kernel:
    """(batch, seq, …) on paper and (seq, batch, …) there: the same bytes."""
    ranks, exchanging, batch, seq, heads, kv_heads, width = case

    def ours(*qkv: Tensor) -> Tensor:
        return exchanged_ring_attention(*(transpose(x, 1, 2) for x in qkv), ranks, exchanging)

    def theirs(*qkv: torch.Tensor) -> torch.Tensor:
        return attention(exchanging, *(x.view(seq, batch, -1, x.shape[3]) for x in qkv))

    return Kernel(ours, theirs, tuple(Arg((batch, seq, n, width)) for n in (heads, kv_heads, kv_heads)))


def real(case: Case) -> tuple[Bytes, Counter[Any]]:
    mode = FusedMode()
    with one_rank(case[0] - 1, case[0]):
        return in_torch(kernel(case), mode), Counter(mode.calls)


@pytest.mark.parametrize("case", [CASES[0], *(pytest.param(c, marks=pytest.mark.slow) for c in CASES[1:])], ids=str)
def test_it_saves_allocates_and_sends_what_the_real_one_does(case: Case) -> None:
    """On the last rank, as for a ring."""
    (theirs_bytes, calls_of), memory = real(case), Memory()
    ours_bytes = on_paper(kernel(case), memory)
    ours = Counter((sent.kind, numel(sent.shape)[0] * sent.dtype.itemsize) for sent in memory.sent)
    theirs: Counter[tuple[str, int]] = Counter()
    for (_, kind, size), calls in calls_of.items():
        theirs[kind, size] += calls if kind != "receive" else 0
    assert ours == +theirs
    assert ours_bytes == theirs_bytes


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (
            {},
            "--cp-comm-type a2a+p2p: needs --cp-exchange-size, the ranks that exchange heads; allowed: a divisor of cp 8: 2, 4",
        ),
        ({"cp_exchange_size": 3}, "--cp-exchange-size 3: leaves no ring of cp 8"),
        ({"cp_exchange_size": 8}, "--cp-exchange-size 8: leaves no ring of cp 8"),
        ({"cp_exchange_size": 2, "cp_comm_type": "a2a"}, "--cp-exchange-size 2: needs --cp-comm-type a2a+p2p"),
        ({"cp_exchange_size": 4, "tp": 16, "gpus": 128}, "--cp-comm-type a2a+p2p: llama-7b has 2 attention heads"),
        ({"engine": "fsdp2", "zero": 3, "cp_exchange_size": 2}, "--cp-comm-type a2a+p2p: with engine fsdp2"),
    ],
)
def test_what_leaves_no_ring_is_refused(more: dict[str, Any], named: str) -> None:
    setup = {"engine": "megatron", "gpus": 8, "cp": 8, "seq_len": 128, "cp_comm_type": "a2a+p2p"}
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate("llama-7b", **{**setup, **more})
    assert str(error.value).startswith(named)


@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_it_sends_to_neighbours_and_around_the_ring(attention: str) -> None:
    setup: dict[str, Any] = {"engine": "megatron", "gpus": 8, "cp": 8, "seq_len": 128, "attention": attention}
    report = memcalc.estimate("llama-7b", **setup, cp_comm_type="a2a+p2p", cp_exchange_size=2, micro_batch_size=2)
    sizes = {(c.collective, c.group_size) for c in report.collectives if c.axis == "cp"}
    assert sizes == {("all_to_all", 2), ("send", 4)}
