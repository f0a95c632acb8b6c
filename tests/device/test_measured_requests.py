"""The caching allocator's rules, against what it reserved on a GPU for the same requests (tests/measured_requests)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from memcalc.device.allocator import Block, CachingAllocator, Pool, segment_size

FOLDER = Path(__file__).resolve().parent.parent / "measured_requests"
RUNS = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))
BY_ADDRESS = ("gpt-oss",)
"""The runs in which it decides that a later segment lies above an earlier one. The driver does that now and then."""


class Placed(CachingAllocator):
    """The allocator with the segments where the driver put them."""

    __slots__ = ("segments",)

    def __init__(self, segments: list[list[int]]) -> None:
        super().__init__()
        self.segments = segments[::-1]

    def _new_block(self, pool: Pool, size: int) -> Block:
        wanted, address = self.segments.pop()
        assert wanted == segment_size(size)
        self._reserve(wanted)
        return Block(address, wanted, pool, None, None)


def run(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))


def reserved(recorded: dict[str, Any], allocator: CachingAllocator) -> list[int]:
    """The bytes reserved when each step begins, and at the end. DeepSpeed has emptied the cache while it was built, too."""
    live: dict[int, Block] = {}
    out: list[int] = []
    marks = [(place, name) for name, place, _ in recorded["marks"]]
    made = 0
    for place, request in enumerate([*recorded["requests"], None]):
        while marks and marks[0][0] == place:
            if marks.pop(0)[1] == "built":
                allocator.empty_cache()
            else:
                out.append(allocator.reserved)
        if isinstance(request, int) and request < 0:
            allocator.release(live.pop(-1 - request))
        elif request is not None:
            nbytes, stream = request if isinstance(request, list) else (request, 0)
            live[made] = allocator.allocate(nbytes, str(stream))
            made += 1
    return out


@pytest.mark.parametrize("name", RUNS)
def test_with_the_drivers_addresses_every_byte_is_the_recorded_one(name: str) -> None:
    recorded = run(name)
    assert reserved(recorded, Placed(recorded["segments"])) == [
        nbytes for name, _, nbytes in recorded["marks"] if name != "built"
    ]


@pytest.mark.parametrize("name", [name for name in RUNS if name not in BY_ADDRESS])
def test_falling_addresses_are_as_good(name: str) -> None:
    recorded = run(name)
    assert reserved(recorded, CachingAllocator())[-1] == recorded["marks"][-1][2]


@pytest.mark.parametrize("name", BY_ADDRESS)
def test_in_some_runs_they_are_not(name: str) -> None:
    recorded = run(name)
    assert reserved(recorded, CachingAllocator())[-1] != recorded["marks"][-1][2]
