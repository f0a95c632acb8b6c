"""The snapshot, read by torch's own module, and by the rules of the page that draws it."""

from __future__ import annotations

import pickle
import pickletools
from itertools import pairwise
from typing import Any

import pytest
from pictured import SETUPS, pictured

from memcalc.pictures.snapshot import snapshot, snapshot_bytes
from memcalc.pictures.timeline import Timeline

OPCODES = {
    "PROTO", "FRAME", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "MEMOIZE", "MARK", "SHORT_BINUNICODE", "BINUNICODE", "BININT",
    "BININT1", "BININT2", "LONG1", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE",
    "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINFLOAT", "STOP",
}  # fmt: skip
"""The opcodes that the page's unpickler reads (torch/utils/viz/MemoryViz.js, unpickle)."""


def of(name: str) -> tuple[Timeline, dict[str, Any]]:
    _, timeline = pictured(name)
    return timeline, pickle.loads(snapshot_bytes(timeline))


@pytest.mark.parametrize("name", ["none", "deepspeed 3"])
def test_the_pages_unpickler_reads_it(name: str) -> None:
    codes = [(code.name, argument) for code, argument, _ in pickletools.genops(snapshot_bytes(pictured(name)[1]))]
    assert codes[0] == ("PROTO", 4)
    assert {code for code, _ in codes} <= OPCODES
    assert all(abs(argument) < 2**53 for code, argument in codes if code.startswith(("BININT", "LONG")) and argument is not None
               and code != "LONG_BINGET")  # fmt: skip


@pytest.mark.parametrize("name", SETUPS)
def test_the_page_draws_the_timeline(name: str) -> None:
    """The page's own way (process_alloc_data.js): what it stacks is what is alive, and the most of it the peak's bytes."""
    timeline, made = of(name)
    (trace,) = made["device_traces"]
    here: dict[int, int] = {}
    before: list[int] = []
    now, alive = 0, [0]
    for event in trace:
        if event["action"] == "alloc":
            assert event["addr"] not in here
            here[event["addr"]] = event["size"]
            now += event["size"]
            alive.append(now)
        elif event["action"] == "free_completed":
            if event["addr"] not in here:
                before.append(event["size"])
            now -= here.pop(event["addr"], event["size"])
            alive.append(now)
    blocks = [
        block for segment in made["segments"] for block in segment["blocks"] if block["state"] == "active_allocated"
    ]
    before += [block["requested_size"] for block in blocks if block["address"] not in here]
    requested = [
        sum(
            block.nbytes
            for block in timeline.blocks
            if block.begin <= moment and (block.end is None or moment < block.end)
        )
        for moment in (0, timeline.peak_event, timeline.events)
    ]
    drawn = [sum(before) + one for one in alive]
    assert [drawn[0], drawn[timeline.peak_event], drawn[-1]] == requested
    assert len(drawn) == timeline.events + 1


@pytest.mark.parametrize("name", SETUPS)
def test_the_page_replays_it_backwards(name: str) -> None:
    """The view of the allocator's state: from the segments at the end back to the begin, every block in a segment."""
    _, made = of(name)
    (trace,) = made["device_traces"]
    segments = {one["address"]: one["total_size"] for one in made["segments"]}
    blocks: dict[int, int] = {}
    for one in made["segments"]:
        assert one["device"] == 0
        assert one["segment_pool_id"] == (0, 0)
        at = one["address"]
        for block in one["blocks"]:  # the page adds up sizes and does not read addresses
            assert block["address"] == at
            if block["state"] == "active_allocated":
                blocks[at] = block["size"]
            at += block["size"]
        assert at == one["address"] + one["total_size"]
    for event in reversed(trace):
        action, address = event["action"], event["addr"]
        if action == "alloc":
            blocks.pop(address)
        elif action == "free_completed":
            assert address not in blocks
            blocks[address] = event["size"]
        elif action == "free_requested":
            assert address in blocks
        elif action == "segment_alloc":
            segments.pop(address)
        elif action == "segment_free":
            segments[address] = event["size"]
        assert (
            event["size"] == 0
            or any(start <= address < start + size for start, size in segments.items())
            or (action == "segment_alloc")
        )


@pytest.mark.parametrize("name", ["none", "deepspeed 3"])
def test_a_free_is_two_events_and_a_category_is_unknown(name: str) -> None:
    _, made = of(name)
    (trace,) = made["device_traces"]
    for event, after in pairwise(trace):
        assert (event["action"] == "free_requested") == (after["action"] == "free_completed")
        assert event["action"] != "free_requested" or event["addr"] == after["addr"]
    categories = {event["category"] for event in trace if "category" in event}
    assert "unknown" in categories
    assert {"activation", "gradient", "temporary"} <= categories
    assert len({id(event) for event in trace}) == len(trace)  # the page writes into events


def test_categories_are_the_profilers() -> None:
    from torch.profiler._memory_profiler import Category

    from memcalc.pictures.snapshot import CATEGORIES

    assert set(CATEGORIES.values()) <= {one.name.lower() for one in Category} | {"unknown"}


@pytest.mark.parametrize("name", ["none", "fsdp2", "deepspeed 3", "megatron, stages"])
def test_torchs_own_module_reads_it(name: str) -> None:
    from torch.cuda import _memory_viz as viz

    timeline, made = of(name)
    allocated = sum(block.nbytes for block in timeline.blocks if block.end is None)
    summary = viz.segsum(made)
    assert f"segments: {len(made['segments'])}" in summary
    assert f"total_allocated: {viz.Bytes(allocated)}" in summary
    assert f"total_reserved: {viz.Bytes(timeline.reserved()[-1])}" in summary
    assert viz.trace(made).count("# free completed") == sum(block.end is not None for block in timeline.blocks)
    flat = viz.memory(made, format_flamegraph=lambda lines: lines)
    assert sum(int(line.rsplit(" ", 1)[1]) for line in flat.splitlines()) == timeline.reserved()[-1]
    for page in (viz.trace_plot(made), viz.segment_plot(made)):
        assert "MemoryViz.js" in page


def test_it_names_the_block_and_where_it_comes_from() -> None:
    _, timeline = pictured("none, accumulating")
    (trace,) = snapshot(timeline)["device_traces"]
    frames = {(frame["name"], frame["filename"]) for event in trace for frame in event["frames"]}
    assert ("model.layers.3.mlp.gate_proj", "backward of micro-batch 2") in frames
