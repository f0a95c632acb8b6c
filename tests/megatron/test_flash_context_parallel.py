"""Attention of the flash-attn package over a sequence that several ranks share, against Transformer Engine's own.

FlashAttention.forward (dot_product_attention/backends.py) lays tensors out by batch before and by sequence after.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformer_engine_oracle as engine
from kernel_bytes import Arg, Kernel, in_torch, on_paper
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

import memcalc
from memcalc.core.dims import numel
from memcalc.core.ops.shape import transpose
from memcalc.core.tensor import Memory, Tensor
from memcalc.megatron.context_parallel import ATTENTION
from memcalc.megatron.context_parallel.flash import flash_attention

Case = tuple[str, int, int, int, int, int, int]
CASES: list[Case] = [
    # kind, ranks, batch, seq/cp, heads, kv_heads, head_dim
    *((kind, ranks, 1, 8, 8, 4, 16) for kind in ATTENTION for ranks in (2, 4)),
    *((kind, ranks, 3, 8, 8, 4, 16) for kind in ("p2p", "a2a") for ranks in (2, 4)),
    *((kind, 8, 2, 4, 16, 16, 8) for kind in ("p2p", "a2a")),
    ("p2p", 3, 2, 6, 5, 1, 8),
]


def _by_head(x: torch.Tensor) -> tuple[int, ...]:
    batch, seq, heads, width = x.shape
    return batch, heads, seq, width


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
    """flash_attn_interface._flash_attn_forward: the output, fp32 statistics by head, no probabilities, the random state."""
    engine._count(sdpa_flop_count(*map(_by_head, (q, k, v))))
    batch, seq, heads, width = q.shape
    sums = torch.empty((batch, heads, seq), dtype=torch.float32)
    return torch.empty((batch, seq, heads, width), dtype=q.dtype), sums, None, torch.empty(0, dtype=torch.int64)


def _backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *_: Any, **__: Any
) -> None:
    """flash_attn_interface._flash_attn_backward: it fills the gradients that it is given."""
    engine._count(sdpa_backward_flop_count(*map(_by_head, (out, q, k, v))))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put flash-attn 2.7 or later in place, with stand-ins for its kernels. Not a fixture: Transformer Engine may be missing."""
    name = "transformer_engine.pytorch.attention.dot_product_attention.backends"
    modules = {".".join(name.split(".")[:depth]): ModuleType("package") for depth in range(1, 6)}
    vars(modules[name]).update(_flash_attn_fwd=_forward, _flash_attn_bwd=_backward)
    for path, module in modules.items():
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(engine._context_parallel(), "fa_utils", mock.Mock())


def theirs(kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FlashAttention.forward with context parallelism: q, k and v (seq/cp, batch, heads, head_dim)."""
    ranks = dist.get_world_size()
    whole, lengths = q.shape[0] * ranks, torch.empty(0, dtype=torch.int32)
    q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    out = engine._context_parallel().attn_forward_func_with_cp(
        True, q, k, v, lengths, lengths, whole, whole, None, None, 0.0, dist.group.WORLD, list(range(ranks)),
        engine._Nothing(), kind, qkv_format="bshd", attn_mask_type="causal", window_size=(-1, 0),
    )  # fmt: skip
    return out.view(q.shape[0], q.shape[1], -1).transpose(0, 1).contiguous()


def kernel(kind: str, batch: int, ranks: int, seq: int, heads: int, kv_heads: int, width: int) -> Kernel:
    """(batch, seq, …) on paper and (seq, batch, …) there: the same bytes."""

    def ours(*qkv: Tensor) -> Tensor:
        return flash_attention(kind)(*(transpose(x, 1, 2) for x in qkv), ranks=ranks)

    def there(*qkv: torch.Tensor) -> torch.Tensor:
        return theirs(kind, *(x.view(seq, batch, -1, x.shape[3]) for x in qkv))

    return Kernel(ours, there, tuple(Arg((batch, seq, n, width)) for n in (heads, kv_heads, kv_heads)))


@pytest.mark.parametrize("sizes", [(2, 3, 8, 8, 4, 16), (4, 2, 8, 8, 8, 16), (3, 2, 6, 4, 2, 8)], ids=str)
def test_gathered_by_batch_is_the_first_rank(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no rank has more than: its late chunk sees all keys."""
    install(monkeypatch)
    ranks, batch, *rest = sizes
    made, memory, mode = kernel("all_gather", batch, ranks, *rest), Memory(), engine.FusedMode()
    ours = on_paper(made, memory)
    with engine.one_rank(0, ranks):
        assert ours == in_torch(made, mode)
    sent = Counter((s.kind, numel(s.shape)[0] * s.dtype.itemsize) for s in memory.sent)
    assert sent == Counter({(kind, size): calls for (_, kind, size), calls in mode.calls.items()})
    for rank in range(1, ranks):
        with engine.one_rank(rank, ranks):
            other = in_torch(made, engine.FusedMode())
        assert other.kept == ours.kept
        assert (other.forward, other.backward) <= (ours.forward, ours.backward)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_saves_allocates_and_sends_what_the_real_one_does(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the last rank, as in test_context_parallel.py."""
    install(monkeypatch)
    kind, ranks, batch, *sizes = case
    made, mode, memory = kernel(kind, batch, ranks, *sizes), engine.FusedMode(), Memory()
    with engine.one_rank(ranks - 1, ranks):
        expected = in_torch(made, mode)
    assert on_paper(made, memory) == expected
    ours = Counter((sent.kind, numel(sent.shape)[0] * sent.dtype.itemsize) for sent in memory.sent)
    sent: Counter[tuple[str, int]] = Counter()
    for (_, what, size), calls in Counter(mode.calls).items():
        sent[what, size] += calls if what != "receive" else 0
    assert ours == +sent


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_step_runs_it(kind: str, batch: int) -> None:
    """With one sequence it saves what the fused kernel does."""
    setup = {"engine": "megatron", "gpus": 2, "cp": 2, "cp_comm_type": kind, "micro_batch_size": batch, "seq_len": 128}
    flash, fused = (
        memcalc.estimate("llama-7b", attention=name, **setup).to_dict()["memory"] for name in ("flash", "sdpa")
    )
    # beside the copy by sequence a ring keeps its own output; the others keep other outputs
    copies = {"p2p": 1, "a2a": 0, "all_gather": 0}[kind] if batch > 1 else 0
    more = copies * 32 * batch * 64 * 4096 * 2  # of each of 32 layers
    assert flash["saved_activations"] - fused["saved_activations"] == more
