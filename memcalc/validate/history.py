"""The caching allocator's history of a step: `torch.cuda.memory._snapshot()["device_traces"]` of one device.

An entry is a mapping with `action` and, as far as they are used here, `addr` and `size`. The actions are "alloc" and
"free_requested" of a tensor's requested bytes, "segment_alloc" and "segment_free" of what the allocator takes from the
device, "segment_map" and "segment_unmap" if its segments can grow, and "oom". If another stream uses a freed block,
others can use it only after "free_completed". Here lives end with the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

POINTS: Final = 40
"""The most points of a phase's timeline."""


def phases_of(trace: Sequence[Mapping[str, Any]], begun: Sequence[tuple[str, int]], live: int) -> list[dict[str, Any]]:
    """Return what happened in each phase, in order. `begun` holds the names of phases and the number of entries before
    each; `live` the bytes before the first."""
    sizes: dict[int, int] = {}
    ends = [start for _, start in begun[1:]] + [len(trace)]
    out: list[dict[str, Any]] = []
    for (name, start), end in zip(begun, ends, strict=True):
        entries = trace[start:end]
        line = timeline(entries, live, sizes)
        live = line[-1]
        out.append(
            {
                "phase": name,
                "peak": max(line),
                "end": live,
                **{what: sum(entry["action"] in actions for entry in entries) for what, actions in _COUNTED.items()},
                "segment_bytes": _segments(entries),
                "timeline": thinned(line, POINTS),
            }
        )
    return out


_COUNTED: Final = {
    "allocations": ("alloc",), "frees": ("free_requested",), "segments": ("segment_alloc", "segment_map"),
}  # fmt: skip


def timeline(entries: Sequence[Mapping[str, Any]], live: int, sizes: dict[int, int]) -> list[int]:
    """Return the live bytes before the entries and after each that changes them. `sizes` has the blocks of earlier
    entries by address, and is updated."""
    out = [live]
    for entry in entries:
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = entry["size"]
            live += entry["size"]
        elif entry["action"] == "free_requested":
            live -= sizes.pop(entry["addr"], entry["size"])
        else:
            continue
        out.append(live)
    return out


def _segments(entries: Sequence[Mapping[str, Any]]) -> int:
    """Return the bytes that the allocator took from the device, less those that it gave back."""
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    return sum(signs.get(entry["action"], 0) * entry.get("size", 0) for entry in entries)


def thinned(line: Sequence[int], points: int) -> list[int]:
    """Return at most `points` points, each the highest of its part, so the peak is among them."""
    if len(line) <= points:
        return list(line)
    bounds = [i * len(line) // points for i in range(points + 1)]
    return [max(line[low:high]) for low, high in pairwise(bounds)]
