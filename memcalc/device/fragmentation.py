"""What is assumed to be lost to fragmentation where a run's allocations cannot be played.

It is that of a setup that is played and allocates alike, as much as the other one has; where there is none, the widest share
that is known. So a setup of which less is known is never the smaller one for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.device.allocator import ROUNDING
from memcalc.megatron.schedules import MOST_AT_ONCE
from memcalc.setup.zero_sizes import ZERO_SIZES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.device.on_device import OnDevice
    from memcalc.setup.setup import Setup

_GPIPE: Final = {"megatron": MOST_AT_ONCE, "fsdp2": 5}
"""Micro-batches of gpipe whose allocations are all written out."""


class Widest(NamedTuple):
    """The most that a run was seen to reserve beyond what it had allocated."""

    percent: int
    source: str


_MEGATRON: Final = Widest(
    10, "the most of 152 ranks of Megatron on B200s is 9.3 % (SimuMax, b200_release_v1.2_summary.json)"
)
_ANY: Final = Widest(
    53,
    "Mistral-7B sharded over 2 A100s: nvidia-smi shows 52.33 GiB with 33.74 allocated, 52.4 % more without the context and NCCL "
    "(fms-acceleration, a100_80gb.csv)",
)


class Assumed(NamedTuple):
    """Bytes, and how they come about."""

    nbytes: int
    formula: str
    source: str
    words: str
    """What a verdict rests on."""


def assumed(report: OnDevice, allocated: int) -> Assumed:
    """The fragmentation of a setup that is not played and has allocated so many bytes."""
    if report.states_only:
        words = "is not known without a model"
        return Assumed(_up(allocated) - allocated, "up to a multiple of 2 MiB", "CUDACachingAllocator.cpp", words)
    for setup, words in _played_instead(report.setup):
        other = report.with_setup(setup)
        if other.played is not None:
            reserved, lost = other.played.reserved, other.played.reserved - other.played.allocated
            most = max(lost, allocated * lost // other.played.allocated, reserved - allocated)
            formula = f"{reserved} B for {other.played.allocated} B {words}: no less, nor a smaller part, here"
            return Assumed(_up(allocated + most) - allocated, formula, "CUDACachingAllocator.cpp", f"is that {words}")
    widest = _MEGATRON if report.setup.engine == "megatron" else _ANY
    whole = _of_whole_layers(report)
    if whole is not None and whole.percent > widest.percent:
        widest, words = whole, "what the same loses without slices and stages, which is played"
    else:
        words = "the widest share that was measured"
    lost = _up(allocated * (100 + widest.percent) // 100) - allocated
    words = f"is not known, and taken as {widest.percent} %, {words}"
    return Assumed(lost, f"{widest.percent} % of {allocated} B", widest.source, words)


def _of_whole_layers(report: OnDevice) -> Widest | None:
    """The share that a data-parallel rank with all of the layers loses, where that is played."""
    s = report.setup
    ranks = s.gpus // (s.tp * s.pp)
    if s.engine != "deepspeed" or s.tp * s.pp == 1 or ranks == 1:
        return None
    # stages have no bucket of that size
    bucket = s.reduce_bucket_size or (ZERO_SIZES["reduce_bucket_size"][1] if s.zero else None)
    whole = s._replace(
        gpus=ranks, tp=1, etp=1, pp=1, pp_rank=None, reduce_bucket_size=bucket, kernels="hf", cross_entropy="eager"
    )
    other = report.with_setup(whole)
    if other.played is None:
        return None
    lost, allocated = other.played.reserved - other.played.allocated, other.played.allocated
    return Widest(-(-100 * lost // allocated), f"{lost} B of {allocated} B without --tp and --pp, over {ranks} ranks")


def _played_instead(setup: Setup) -> Iterator[tuple[Setup, str]]:
    """Setups that are played and allocate alike, the most alike first."""
    most = _GPIPE.get(setup.engine)
    if setup.schedule == "gpipe" and setup.pp > 1 and most is not None and setup.micro_batches > most:
        fewer = setup._replace(global_batch_size=setup.dp * setup.micro_batch_size * most)
        yield fewer, f"with {most} micro-batches"
    if setup.engine == "deepspeed" and setup.optimizer_implementation != "fused":
        yield setup._replace(optimizer="adamw", optimizer_implementation="fused"), "with DeepSpeed's FusedAdam"


def _up(nbytes: int) -> int:
    """To a multiple of 2 MiB, as segments are."""
    return -(-nbytes // ROUNDING) * ROUNDING
