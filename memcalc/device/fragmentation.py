"""The fragmentation that is assumed if a run's allocations cannot be played.

The assumption is the fragmentation of a similar setup that can be played. Without such a setup it is the largest share that
was measured or played. So a setup that cannot be played never looks smaller for that reason.
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
"""The most micro-batches of gpipe that can be played, by engine."""


class Widest(NamedTuple):
    """The largest share that a run reserved beyond what it had allocated, in percent of `allocated`."""

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
    """The assumed fragmentation in bytes, with its formula and source."""

    nbytes: int
    formula: str
    source: str
    words: str
    """The end of the sentence "the fragmentation ..." in a verdict."""


def assumed(report: OnDevice, allocated: int) -> Assumed:
    """Return the fragmentation to assume for a setup that is not played; `allocated` is in bytes."""
    if report.states_only:
        words = "is not known without a model"
        return Assumed(_up(allocated) - allocated, "up to a multiple of 2 MiB", "CUDACachingAllocator.cpp", words)
    for setup, words in _played_instead(report.setup):
        other = report.with_setup(setup)
        if other.played is not None:
            reserved, lost = other.played.reserved, other.played.reserved - other.played.allocated
            most = max(lost, allocated * lost // other.played.allocated, reserved - allocated)
            formula = f"{reserved} B for {other.played.allocated} B {words}: no less, nor a smaller part, here"
            return Assumed(
                _up(allocated + most) - allocated,
                formula,
                "CUDACachingAllocator.cpp",
                f"is taken from the same run {words}",
            )
    widest = _MEGATRON if report.setup.engine == "megatron" else _ANY
    whole = _of_whole_layers(report)
    if whole is not None and whole.percent > widest.percent:
        widest, words = whole, "as without --tp and --pp"
    else:
        words = "the most that was measured"
    lost = _up(allocated * (100 + widest.percent) // 100) - allocated
    words = f"is not known and assumed to be {widest.percent}%, {words}"
    return Assumed(lost, f"{widest.percent}% of {allocated} B", widest.source, words)


def _of_whole_layers(report: OnDevice) -> Widest | None:
    """Return the share that a data-parallel rank of DeepSpeed with all layers loses: the setup without --tp and --pp.

    Return None for other engines, for a setup without --tp and --pp, for a single data-parallel rank, and if the setup with all
    layers is not played.
    """
    s = report.setup
    ranks = s.gpus // (s.tp * s.pp)
    if s.engine != "deepspeed" or s.tp * s.pp == 1 or ranks == 1:
        return None
    # a pipeline has no reduce_bucket_size: take DeepSpeed's default
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
    """Yield similar setups that may be played, the most similar first, with words for the difference."""
    most = _GPIPE.get(setup.engine)
    if setup.schedule == "gpipe" and setup.pp > 1 and most is not None and setup.micro_batches > most:
        fewer = setup._replace(global_batch_size=setup.dp * setup.micro_batch_size * most)
        yield fewer, f"with {most} micro-batches"
    if setup.engine == "deepspeed" and setup.optimizer_implementation != "fused":
        yield setup._replace(optimizer="adamw", optimizer_implementation="fused"), "with DeepSpeed's FusedAdam"


def _up(nbytes: int) -> int:
    """Round bytes up to a multiple of 2 MiB, the size of segments."""
    return -(-nbytes // ROUNDING) * ROUNDING
