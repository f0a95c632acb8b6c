"""DDP's communication hooks: what is held and sent in the place of a bucket's all-reduce.

Sources: torch/distributed/algorithms/ddp_comm_hooks, default_hooks.py (fp16, bf16) and powerSGD_hook.py (PowerSGD, Vogels et
al. 2019, arXiv 1905.13727), with PowerSGDState's defaults but the rank: error feedback, warm start, `min_compression_rate` 2.

A hook runs when the last gradient of a bucket is ready. fp16 and bf16 send a copy of the bucket. PowerSGD sends a matrix of a
gradient, n by m, as two matrices of `rank` columns, P with n rows and Q with m, in two all-reduces; gradients that this does
not make half as large are sent as they are, in one more. P, Q and what they left out (error_dict) stay between steps.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.dtypes import DType, bf16, fp16
from memcalc.core.noted import Ready
from memcalc.core.rows import Row
from memcalc.layout.collectives import Collective

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memcalc.core.noted import Noted
    from memcalc.setup.setup import Setup
    from memcalc.tape.rewritten import Out

_FOLDER: Final = "torch/distributed/algorithms/ddp_comm_hooks"
CASTS: Final = f"{_FOLDER}/default_hooks.py: _compress_hook"
POWER_SGD: Final = f"{_FOLDER}/powerSGD_hook.py"
_LEAST_RATE: Final = 2
"""PowerSGDState's `min_compression_rate`."""

Size = tuple[int, ...]
"""The shape of a gradient."""


class Sent(NamedTuple):
    """One all-reduce of a bucket: its subject and its elements."""

    name: str
    elements: int


class Bucket(NamedTuple):
    """A bucket under a hook, in elements."""

    whole: int
    """The elements of the reducer's bucket."""
    states: tuple[tuple[str, int], ...]
    """The tensors that the hook keeps between steps."""
    passing: tuple[tuple[str, int, DType], ...]
    """The tensors that are alive together when the hook ends, besides the bucket and those that it keeps."""
    sent: tuple[Sent, ...]
    wire: DType
    """The dtype of what is sent."""


def under_hook(setup: Setup, dtype: DType, gradients: Sequence[Size]) -> Bucket:
    """Return a bucket of these gradients of this dtype, under the setup's hook and in its phase."""
    whole = sum(map(_elements, gradients))
    if setup.comm_hook in ("fp16", "bf16"):
        return _cast(whole, dtype, fp16 if setup.comm_hook == "fp16" else bf16)
    if setup.compression_phase == "warmup":
        return Bucket(whole, (), (), (Sent("gradient buckets", whole),), dtype)
    assert setup.powersgd_rank is not None
    if setup.comm_hook == "powersgd":
        return _by_matrix(gradients, whole, dtype, setup.powersgd_rank)
    return _as_square(whole, dtype, setup.powersgd_rank)


def _cast(whole: int, dtype: DType, wire: DType) -> Bucket:
    """Return a bucket that is sent in `wire`; one of that dtype is sent itself (Tensor.to)."""
    copy = () if wire is dtype else ((f"a bucket in {wire.name}", whole, wire),)
    return Bucket(whole, (), copy, (Sent(f"gradient buckets in {wire.name}", whole),), wire)


def _by_matrix(gradients: Sequence[Size], whole: int, dtype: DType, rank: int) -> Bucket:
    """Return a bucket under powerSGD_hook."""
    of_p = of_q = as_they_are = 0
    for shape in gradients:
        n, m = as_matrix(shape)
        own = min(n, m, rank)
        if is_compressed(n, m, own):
            of_p, of_q = of_p + n * own, of_q + m * own
        else:
            as_they_are += n * m
    passing = ("gradients that are sent as they are, joined", as_they_are, dtype)
    return _approximated(whole, whole, (of_p, of_q), dtype, (passing,) if as_they_are else ())._replace(
        sent=(Sent("gradients as they are", as_they_are), Sent("PowerSGD's P", of_p), Sent("PowerSGD's Q", of_q)),
    )


def _as_square(whole: int, dtype: DType, rank: int) -> Bucket:
    """Return a bucket under batched_powerSGD_hook: padded to one square matrix."""
    side = isqrt(whole - 1) + 1
    each = side * rank
    return _approximated(side * side, whole, (each, each), dtype, ())


def _approximated(
    padded: int, whole: int, factors: tuple[int, int], dtype: DType, passing: tuple[tuple[str, int, DType], ...]
) -> Bucket:
    """Return a bucket whose storage has `padded` elements. When the hook ends there are a copy of the bucket and the new
    error, while the old one is still referred to."""
    of_p, of_q = factors
    kept = (("PowerSGD's errors (error_dict)", padded), ("PowerSGD's P", of_p), ("PowerSGD's Q", of_q))
    copies = (("a copy of the bucket", padded, dtype), ("the bucket's new error", padded, dtype))
    sent = Sent("PowerSGD's P", of_p), Sent("PowerSGD's Q", of_q)
    return Bucket(padded, kept, (*passing, *copies), sent, dtype)


def as_matrix(shape: Size) -> tuple[int, int]:
    """Return the rows and columns of a gradient as a matrix: the first dim, and all others."""
    rows = shape[0]
    return rows, _elements(shape) // rows if rows else 0


def is_compressed(n: int, m: int, rank: int) -> bool:
    """Tell whether two matrices of `rank` columns are worth it (_should_compress)."""
    return (n + m) * rank * _LEAST_RATE < n * m


def _elements(shape: Size) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


# --- rows


def rows_of(buckets: Sequence[Bucket], dtype: DType) -> list[Row]:
    """Return what a hook keeps between steps, a row for each kind."""
    totals: dict[str, int] = {}
    for bucket in buckets:
        for name, elements in bucket.states:
            totals[name] = totals.get(name, 0) + elements
    return [
        Row("buffers", name, (Dim("elements", elements),), dtype, basis="modelled", source=POWER_SGD)
        for name, elements in totals.items()
        if elements
    ]


def largest(buckets: Sequence[Bucket]) -> tuple[Row, ...]:
    """Return the rows of what is alive when a hook ends, of the bucket that has most of it."""
    source = POWER_SGD if buckets[0].states else CASTS
    most = max(buckets, key=lambda bucket: sum(n * dtype.itemsize for _, n, dtype in bucket.passing))
    return tuple(
        Row("buffers", name, (Dim("bucket", n),), dtype, life="a bucket's hook", basis="modelled", source=source)
        for name, n, dtype in most.passing
    )


def sent_by(buckets: Sequence[Bucket], setup: Setup, times: int) -> list[Collective]:
    """Return the all-reduces of a step whose gradients are reduced `times` times.

    PowerSGD's hook waits for the GPU (torch.cuda.synchronize) before autograd goes on, so nothing hides what it sends.
    """
    waits = bool(buckets[0].states)
    out: list[Collective] = []
    for i, (name, _) in enumerate(buckets[0].sent):
        dtype, each = buckets[0].wire, [bucket.sent[i].elements for bucket in buckets]
        payload = times * sum(each) * dtype.itemsize
        several = f"{times}·" if times > 1 else ""
        out.append(
            Collective(
                "dp", "all_reduce", name, "backward", dtype.name, setup.dp, times * len(each), payload,
                f"{several}{sum(each)}·{dtype.itemsize} B = {payload} B", source=POWER_SGD if setup.powersgd_rank else CASTS,
                overlap="exposed" if waits else "backward", tail=0 if waits else times * each[-1] * dtype.itemsize,
            )
        )  # fmt: skip
    return out


# --- while backward runs


class HookedBuckets(NamedTuple):
    """A hook while backward runs: when the last gradient of a bucket is ready, its blocks are there for a moment."""

    ends: tuple[int, ...]
    """The number of gradients that are ready when each bucket is."""
    passing: tuple[tuple[tuple[str, int, DType], ...], ...]
    keeps: bool
    """True if the gradients stay as they are; False if they have been added to those of earlier micro-batches."""

    def play(self, noted: Noted, out: Out) -> None:
        kept: list[object] = []
        blocks = dict(zip(self.ends, self.passing, strict=True))
        ready = 0
        for event in noted.events:
            out.reach(event.place)
            if not isinstance(event, Ready):
                continue
            out.reach(event.after)
            if self.keeps:
                kept.append(out.block_of_run(event.block))
            ready += 1
            _pass(out.block, blocks.get(ready, ()))


def _pass(block: Callable[[str, str, int, DType], object], passing: tuple[tuple[str, int, DType], ...]) -> None:
    """Allocate blocks, and free them."""
    _there = [block(name, "bucket", elements, dtype) for name, elements, dtype in passing]
