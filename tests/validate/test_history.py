"""The allocator's history, of a trace that is written after torch's documentation (torch.cuda.memory._snapshot)."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.validate.history import phases_of, thinned, timeline


def alloc(addr: int, size: int) -> dict[str, Any]:
    return {"action": "alloc", "addr": addr, "size": size, "stream": 0, "frames": [], "pool_id": (0, 0)}


def free(addr: int, size: int) -> list[dict[str, Any]]:
    rest = {"addr": addr, "size": size, "stream": 0, "frames": []}
    return [{"action": "free_requested", **rest}, {"action": "free_completed", **rest}]


def segment(action: str, size: int) -> dict[str, Any]:
    return {"action": action, "addr": 1, "size": size, "stream": 0, "frames": []}


TRACE = [
    segment("segment_alloc", 2**21), alloc(512, 100), alloc(1024, 50), *free(1024, 50), {"action": "snapshot", "size": 0},
    alloc(1024, 70), *free(512, 100), *free(4096, 30),
    segment("segment_free", 2**21), {"action": "oom", "size": 5, "device_free": 3, "stream": 0, "frames": []},
    *free(1024, 70), alloc(512, 8),
]  # fmt: skip
BEGUN = [("forward", 0), ("backward", 5), ("step", 15)]


def test_lives_and_peaks_of_each_phase() -> None:
    forward, backward, step = phases_of(TRACE, BEGUN, 1000)
    assert forward["timeline"] == [1000, 1100, 1150, 1100]
    assert (forward["peak"], forward["end"], forward["allocations"], forward["frees"]) == (1150, 1100, 2, 1)
    assert (forward["segments"], forward["segment_bytes"]) == (1, 2**21)
    assert backward["timeline"] == [1100, 1170, 1070, 1040, 970]  # 4096 was there before the history
    assert (backward["peak"], backward["end"], backward["segment_bytes"]) == (1170, 970, -(2**21))
    assert (step["phase"], step["timeline"]) == ("step", [970, 978])


def test_segments_that_grow() -> None:
    """With expandable_segments there is one segment, and what is mapped of it."""
    trace = [segment("segment_map", 2**21), segment("segment_map", 2**21), segment("segment_unmap", 2**21)]
    (only,) = phases_of(trace, [("forward", 0)], 0)
    assert (only["segments"], only["segment_bytes"]) == (2, 2**21)


def test_a_phase_in_which_nothing_happens() -> None:
    (only,) = phases_of([], [("forward", 0)], 7)
    assert (only["peak"], only["end"], only["timeline"]) == (7, 7, [7])


def test_an_address_is_used_again() -> None:
    sizes: dict[int, int] = {}
    assert timeline([alloc(1, 4), *free(1, 4), alloc(1, 9), *free(1, 9)], 0, sizes) == [0, 4, 0, 9, 0]
    assert sizes == {}


@pytest.mark.parametrize("length", [1, 39, 40, 41, 1000])
def test_a_thinned_line_keeps_the_peak(length: int) -> None:
    line = [(7 * i) % 101 for i in range(length)]
    assert len(thinned(line, 40)) == min(length, 40)
    assert max(thinned(line, 40)) == max(line)
