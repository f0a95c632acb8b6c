"""torchtitan's Llama 3 under FSDP2 and per-op selective checkpointing: what a step allocates, in which order, on which stream.

Written from torch's modules after torchtitan 0.1.0 (torchtitan/models/llama3/model/model.py, infra/parallelize.py,
components/loss.py, train.py), the oldest release with its code; the benchmark's commit is half a year older. Its RMSNorm is
composite, as torch's was then. `fully_shard` is over each block, of which the last one is not resharded after forward, and
over the model, which torch of that time never reshards. The step: the loss of fp32 logits, of which the 16-bit ones are
dropped before backward; AdamW, foreach. Clipping allocates single numbers only and is left out.

Streams are those of FSDP2: gathers are copied in on one, reduced gradients are on another, all else is on the default one.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from fsdp2_oracle import ranks, resizing
from oracle import cuda_kernels
from per_op import per_op_contexts
from records import on_record
from storage_events import Event, EventMode, renumbered
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn import functional as F


class Sizes(NamedTuple):
    """Llama 3.1 8B."""

    layers: int = 32
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256


class Release(NamedTuple):
    """What was otherwise at some time than in torchtitan 0.1.0 over this torch."""

    recompute: str = "op"
    positions: int | None = None
    """Rows of the table of rotations; as many as a sequence has tokens where that is not said."""
    logits_stay: bool = False
    """The model returns fp32 logits, which the loop has until the next forward's are there."""
    reduced_from: str = "default"
    """The stream that a reduction's input is on."""


MARCH_2024 = Release(positions=65536, logits_stay=True, reduced_from="reduce")
"""torchtrain when it went over to FSDP2 (its pull request 165); FSDP2 got the input off its own stream in June 2024
(pytorch's pull request 129721)."""


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """As complex numbers of two fp32; x (batch, seq, heads, head_dim), angles (seq, head_dim / 2)."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


class Block(nn.Module):
    """Attention and a gated MLP; k and v are repeated to all heads."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.sizes, self.head_dim = s, s.hidden // s.heads
        widths = {"q": s.hidden, "k": s.kv_heads * self.head_dim, "v": s.kv_heads * self.head_dim, "o": s.hidden}
        self.attention = nn.ModuleDict({name: nn.Linear(s.hidden, out, bias=False) for name, out in widths.items()})
        self.gate = nn.Linear(s.hidden, s.ffn, bias=False)
        self.down = nn.Linear(s.ffn, s.hidden, bias=False)
        self.up = nn.Linear(s.hidden, s.ffn, bias=False)
        self.attention_norm, self.ffn_norm = Norm(s.hidden), Norm(s.hidden)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        h = x + self.attend(self.attention_norm(x), angles)
        return h + self.feed(self.ffn_norm(h))

    def attend(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.attention[name](x) for name in "qkv")
        q, k, v = (t.view(*x.shape[:2], -1, self.head_dim) for t in (q, k, v))
        q, k = rotated(q, angles), rotated(k, angles)
        q, k, v = (t.transpose(1, 2) for t in (q, self.repeated(k), self.repeated(v)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention["o"](out.transpose(1, 2).contiguous().view(*x.shape[:2], -1))

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        times = self.sizes.heads // self.sizes.kv_heads
        return x.unsqueeze(3).expand(*x.shape[:3], times, x.shape[3]).reshape(*x.shape[:2], -1, x.shape[3])

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self, s: Sizes, positions: int, recompute: str) -> None:
        super().__init__()
        policy: dict[str, Any] = {"context_fn": per_op_contexts} if recompute == "op" else {}
        self.embedding = nn.Embedding(s.vocab, s.hidden)
        self.register_buffer("angles", torch.zeros(positions, s.hidden // s.heads // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(
            checkpoint_wrapper(Block(s), preserve_rng_state=False, **policy) for _ in range(s.layers)
        )
        self.norm, self.output = Norm(s.hidden), nn.Linear(s.hidden, s.vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embedding(ids)
        for layer in self.layers:
            h = layer(h, self.angles)
        return self.output(self.norm(h))


@contextlib.contextmanager
def streams(mode: EventMode, reduced_from: str) -> Iterator[None]:
    """What FSDP2 allocates while it gathers is on one stream; of a reduction all but its input on another.

    DTensor's shapes of results, which it works out once per op, are no allocations.
    """
    gather, reduce = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def on_gather(*args: Any, **kwargs: Any) -> Any:
        mode.stream = "gather"
        try:
            return gather(*args, **kwargs)
        finally:
            mode.stream = "default"

    def on_reduce(*args: Any, **kwargs: Any) -> Any:
        comm = args[4] if len(args) > 4 else kwargs["reduce_scatter_comm"]
        own, places = comm.allocate, iter((reduced_from, "reduce"))

        def allocate(*sizes: Any, **how: Any) -> torch.Tensor:
            mode.stream = next(places)  # the input of the reduction, then its output
            return own(*sizes, **how)

        comm.allocate = allocate
        try:
            return reduce(*args, **kwargs)
        finally:
            del comm.allocate
            mode.stream = "default"

    def unseen(*args: Any) -> Any:
        mode.propagating = True
        try:
            return propagate(*args)
        finally:
            mode.propagating = False

    _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce = on_gather, on_reduce
    ShardingPropagator._propagate_tensor_meta_non_cached = unseen
    try:
        yield
    finally:
        _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce = gather, reduce
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate


class Steps(NamedTuple):
    """Of the second step the peaks in bytes; and what two steps did, in order."""

    forward: int
    backward: int
    step: int
    events: list[Event]


@on_record
def two_steps(gpus: int, micro_batch_size: int, seq_len: int, sizes: Sizes, release: Release | None = None) -> Steps:
    """Of rank 0. From the second step on everything repeats."""
    mode, release = EventMode(), release or Release()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ranks(gpus))
        mesh = init_device_mesh("cpu", (gpus,))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for context in (cuda_kernels(), resizing(mode), streams(mode, release.reduced_from)):
            stack.enter_context(context)
        model = Model(sizes, release.positions or seq_len, release.recompute)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for i, layer in enumerate(model.layers):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=i < sizes.layers - 1)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for tensor in [*(p._local_tensor for p in model.parameters()), model.angles]:
            mode.register(tensor)
        peaks: list[int] = []
        kept: list[torch.Tensor] = []
        with mode:
            for _ in range(2):
                ids, labels = (torch.zeros((micro_batch_size, seq_len), dtype=torch.int64) for _ in range(2))
                peaks = _step(mode, model, optimizer, ids, labels, kept if release.logits_stay else None)
    return Steps(*peaks, renumbered(mode.events))


def _step(
    mode: EventMode,
    model: Model,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    labels: torch.Tensor,
    kept: list[torch.Tensor] | None,
) -> list[int]:
    optimizer.zero_grad()
    gc.collect()
    peaks: list[int] = []
    mode.begin()
    logits = model(ids)
    if kept is not None:
        logits = logits.float()
        kept[:] = [logits]
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
    peaks.append(mode.highest)
    del logits
    mode.begin()
    loss.backward()
    peaks.append(mode.highest)
    mode.begin()
    optimizer.step()
    return [*peaks, mode.highest]
