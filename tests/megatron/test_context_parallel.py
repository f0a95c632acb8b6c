"""Attention over a sequence that several ranks share, against Transformer Engine's own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from kernel_bytes import Arg, Bytes, Kernel, in_torch, on_paper
from megatron_oracle import Calls
from records import on_record
from transformer_engine_oracle import FusedMode, attention, one_rank

from memcalc.core.dims import numel
from memcalc.core.ops.shape import transpose
from memcalc.core.tensor import Memory, Tensor
from memcalc.megatron.context_parallel import ATTENTION

Case = tuple[str, int, int, int, int, int, int, int]
CASES: list[Case] = [
    # kind, ranks, batch, seq/cp, heads, kv_heads, head_dim, width of values
    *((kind, ranks, 3, 8, 8, 4, 16, 16) for kind in ATTENTION for ranks in (2, 4)),
    *((kind, 8, 1, 4, 16, 16, 8, 8) for kind in ATTENTION),
    ("p2p", 3, 2, 6, 5, 1, 8, 8),
    ("all_gather", 3, 2, 6, 5, 1, 8, 8),
    ("p2p", 4, 2, 8, 4, 4, 24, 16),
]


def kernel(kind: str, ranks: int, batch: int, seq: int, heads: int, kv_heads: int, width: int, v_width: int) -> Kernel:
    """(batch, seq, …) on paper and (seq, batch, …) there: the same bytes."""

    def ours(*qkv: Tensor) -> Tensor:
        return ATTENTION[kind](*(transpose(x, 1, 2) for x in qkv), ranks)  # type: ignore[call-arg]

    def theirs(*qkv: torch.Tensor) -> torch.Tensor:
        return attention(kind, *(x.view(seq, batch, -1, x.shape[3]) for x in qkv))

    heads_and_widths = ((heads, width), (kv_heads, width), (kv_heads, v_width))
    return Kernel(ours, theirs, tuple(Arg((batch, seq, n, d)) for n, d in heads_and_widths))


@on_record
def real(case: Case, rank: int) -> tuple[Bytes, Calls]:
    """Bytes on a rank, and what it sends."""
    mode = FusedMode()
    with one_rank(rank, case[1]):
        return in_torch(kernel(*case), mode), Counter(mode.calls)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_saves_allocates_and_sends_what_the_real_one_does(case: Case) -> None:
    """On the last rank: of the ring the one that is modelled, of the others all are alike."""
    (theirs_bytes, calls_of), memory = real(case, case[1] - 1), Memory()
    assert on_paper(kernel(*case), memory) == theirs_bytes
    ours = Counter((sent.kind, numel(sent.shape)[0] * sent.dtype.itemsize) for sent in memory.sent)
    theirs: Counter[tuple[str, int]] = Counter()
    for (_, kind, size), calls in calls_of.items():
        theirs[kind, size] += calls if kind != "receive" else 0
    assert ours == +theirs


@pytest.mark.parametrize("kind", ATTENTION)
def test_no_rank_has_more(kind: str) -> None:
    """In a ring half of the logsumexp apart, which all but the last have in backward besides: 3 sequences, 8 heads, 8 tokens."""
    bytes_of: list[Bytes] = []
    for rank in range(4):
        bytes_of.append(real((kind, 4, 3, 8, 8, 4, 16, 16), rank)[0])
    last, half = bytes_of[-1], 3 * 8 * 8 * 4 // 2 if kind == "p2p" else 0
    assert len({one.flops for one in bytes_of}) == 1
    assert max(one.forward for one in bytes_of) == last.forward
    assert max(one.backward for one in bytes_of) == last.backward + half
