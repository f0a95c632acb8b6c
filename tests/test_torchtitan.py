"""torchtitan's published memory: its own model under FSDP2, and the estimate of transformers' with the same sizes."""

from __future__ import annotations

import pytest
from caching_allocator import MIB, Block, CachingAllocator
from published_runs import RESERVED_RUNS, TORCHTITANS_OWN, ReservedRun
from torchtitan_oracle import Event, Sizes, two_steps

import memcalc
from memcalc.dims import evaluate, numel
from memcalc.dtypes import bf16, fp32
from memcalc.engines.fsdp2_step import Sharding, padded_elements
from memcalc.profile import Choices, trace
from memcalc.selective import per_op

GIB = 2**30
CUBLAS_WORKSPACE = 32 * MIB  # sm_90


def reserved(events: list[Event]) -> int:
    """What the caching allocator holds after these allocations and frees."""
    allocator = CachingAllocator()
    allocator.allocate(CUBLAS_WORKSPACE, "default")
    live: dict[int, Block] = {}
    for storage, nbytes, stream in events:
        if nbytes:
            live[storage] = allocator.allocate(nbytes, stream)
        else:
            allocator.release(live.pop(storage))
    return allocator.reserved


def test_torchtitans_own_model() -> None:
    """Its peak is the estimate's, and the allocator holds for it what was published."""
    run = RESERVED_RUNS[0]
    real, report = two_steps(run.options["gpus"], 2, 8192, Sizes()), run.estimate()
    assert abs(report.phases["forward"] - real.forward) < 0.01 * GIB
    assert abs(report.phases["backward"] - real.backward) < 0.01 * GIB
    replayed = reserved(real.events) / GIB
    assert {"peak": round(real.backward / GIB, 2), "replayed": round(replayed, 2)} == TORCHTITANS_OWN
    assert abs(replayed / run.reserved - 1) < 0.01


STREAMS = {
    "all-gather result": "gather",
    "shard, cast to be gathered": "gather",
    "sharded gradients": "reduce",
}
"""What FSDP2 allocates on streams of its own, by the names of the estimate's rows."""


def reserved_for_the_estimate(run: ReservedRun) -> int:
    """The same of memcalc's own run, all layers written out: two steps, after the first of which AdamW makes its states."""
    model, gpus = memcalc.load_model(run.model), run.options["gpus"]
    hooks = Sharding(gpus, reshards=True, sharded=fp32, reduced=fp32, accumulating=False)
    choices = Choices(bf16, "sdpa", recompute=True, accumulating=False, hooks=hooks, policy=per_op)
    batch, seq = run.options["micro_batch_size"], run.options["seq_len"]
    log = trace(model.program, choices, batch, seq, model.layers)
    sizes = [evaluate(numel(row.shape)[1], batch, seq) * row.dtype.itemsize for row in log.rows]
    shards = [padded_elements(w.shape, gpus) // gpus * fp32.itemsize for w in model.program.weights()]
    allocator = CachingAllocator()
    for nbytes in (CUBLAS_WORKSPACE, *shards):
        allocator.allocate(nbytes, "default")
    for step in range(2):
        live: dict[int, Block] = {}
        for event in log.log:
            row = log.rows[event if event >= 0 else ~event]
            if event < 0 and ~event in live:
                allocator.release(live.pop(~event))
            elif event >= 0 and row.component != "parameters":
                live[event] = allocator.allocate(sizes[event], STREAMS.get(row.name, "default"))
        if step == 0:
            for nbytes in shards:
                allocator.allocate(nbytes, "default"), allocator.allocate(nbytes, "default")
        for block in [allocator.allocate(nbytes, "default") for nbytes in shards]:  # foreach's temporary
            allocator.release(block)
        for block in live.values():  # zero_grad
            allocator.release(block)
    return allocator.reserved


@pytest.mark.parametrize("run", RESERVED_RUNS, ids=lambda run: run.name)
def test_the_estimates_own_allocations(run: ReservedRun) -> None:
    replayed = reserved_for_the_estimate(run) / GIB
    assert round(replayed, 2) == run.replayed
    assert abs(replayed / run.reserved - 1) < 0.01


# --- the allocator's rules


def test_segments() -> None:
    sizes = (1, MIB, MIB + 1, 9 * MIB, 10 * MIB, 11 * MIB)
    reserved_for = []
    for size in sizes:
        allocator = CachingAllocator()
        allocator.allocate(size, "default")
        reserved_for.append(allocator.reserved // MIB)
    assert reserved_for == [2, 2, 20, 20, 10, 12]


def test_a_free_block_is_taken_by_its_stream_alone() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(50 * MIB, "default"))
    allocator.allocate(30 * MIB, "default")
    assert allocator.reserved == 50 * MIB
    allocator.allocate(20 * MIB, "gather")
    assert allocator.reserved == 70 * MIB
    allocator.allocate(20 * MIB, "default")  # what the first one left
    assert allocator.reserved == 70 * MIB


def test_neighbours_become_one_and_segments_do_not() -> None:
    allocator = CachingAllocator()
    whole = allocator.allocate(60 * MIB, "default")
    allocator.release(whole)
    parts = [allocator.allocate(20 * MIB, "default") for _ in range(3)]
    for part in (parts[0], parts[2], parts[1]):
        allocator.release(part)
    allocator.allocate(60 * MIB, "default")
    assert allocator.reserved == 60 * MIB
    other = allocator.allocate(60 * MIB, "default")
    allocator.release(other)
    allocator.allocate(61 * MIB, "default")
    assert allocator.reserved == (60 + 60 + 62) * MIB


def test_what_is_left_of_a_large_block_is_split_off_above_a_mebibyte() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(20 * MIB, "default"))
    assert allocator.allocate(19 * MIB, "default").size == 20 * MIB
    other = CachingAllocator()
    other.release(other.allocate(20 * MIB, "default"))
    assert other.allocate(19 * MIB - 512, "default").size == 19 * MIB - 512
