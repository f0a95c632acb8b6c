"""torchtitan's published memory: its own model under FSDP2, and the estimate of transformers' with the same sizes."""

from __future__ import annotations

import pytest
from published_runs import RESERVED_RUNS, TORCHTITANS_OWN, ReservedRun
from torchtitan_oracle import Event, Sizes, two_steps

import memcalc
from memcalc.allocator import Block, CachingAllocator, rounded
from memcalc.device import HANDLES, PLAYED_ERROR
from memcalc.dims import evaluate, numel
from memcalc.engines.fsdp2_step import STREAMS
from memcalc.units import GIB, MIB

CUBLAS_WORKSPACE = 32 * MIB  # sm_90


def reserved(events: list[Event]) -> int:
    """What the caching allocator holds after these allocations and frees."""
    allocator = CachingAllocator()
    for _ in range(HANDLES):
        allocator.allocate(CUBLAS_WORKSPACE, "default")
    live: dict[int, Block] = {}
    for storage, nbytes, stream in events:
        if nbytes:
            live[storage] = allocator.allocate(nbytes, stream)
        else:
            allocator.release(live.pop(storage))
    return allocator.reserved


@pytest.mark.slow
def test_torchtitans_own_model() -> None:
    """Its peak is the estimate's, and the allocator holds for it what was published."""
    run = RESERVED_RUNS[0]
    real, report = two_steps(run.options["gpus"], 2, 8192, Sizes()), run.estimate()
    assert abs(report.phases["forward"] - real.forward) < 0.01 * GIB
    assert abs(report.phases["backward"] - real.backward) < 0.01 * GIB
    replayed = reserved(real.events) / GIB
    assert {"peak": round(real.backward / GIB, 2), "replayed": round(replayed, 2)} == TORCHTITANS_OWN
    assert abs(replayed / run.reserved - 1) < 0.01
    assert on_streams(real.events) == on_streams_of_the_estimate(report, run)


def on_streams(events: list[Event]) -> set[tuple[str, int]]:
    """What is allocated on FSDP2's own streams, in sizes of blocks."""
    names = {"gather": "all-gather copy-in", "reduce": "reduce-scatter"}
    return {(names[event.stream], rounded(event.nbytes)) for event in events if event.stream in names}


def on_streams_of_the_estimate(report: memcalc.Report, run: ReservedRun) -> set[tuple[str, int]]:
    batch, seq = run.options["micro_batch_size"], run.options["seq_len"]
    return {
        (STREAMS[row.name], rounded(evaluate(numel(row.shape)[1], batch, seq) * row.dtype.itemsize))
        for row in report.rank.profiles[0].run.rows
        if row.name in STREAMS
    }


@pytest.mark.parametrize("run", RESERVED_RUNS, ids=lambda run: run.name)
def test_published_reserved_memory(run: ReservedRun) -> None:
    """What is allocated would be 13 to 17 % short of it."""
    report = run.estimate()
    assert abs(report.reserved / GIB / run.reserved - 1) < PLAYED_ERROR / 100
    assert report.allocated / GIB / run.reserved - 1 < -0.1
