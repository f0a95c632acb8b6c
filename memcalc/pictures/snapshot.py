"""A timeline as a memory snapshot of PyTorch: the pickle that its memory_viz page and torch.cuda._memory_viz read.

The page reads protocols 2 to 4, and only dicts, lists, tuples, strings and numbers. It replays the events backwards from
the segments as they are at the end. A block from before the step is in a segment and has no event of its own. A free is
two events, which the page merges. If any event has a category, one has to be "unknown", or the page throws an error.

Sources: torch/utils/viz/MemoryViz.js, torch/utils/viz/process_alloc_data.js, torch/cuda/_memory_viz.py.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from memcalc.pictures.labels import ALLOCATOR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.pictures.timeline import Block, Segment, Timeline

PROTOCOL: Final = 4
_DEVICE: Final = 0
_FIRST_ADDRESS: Final = 0x7F0000000000
"""The address of the first segment. The page holds addresses in doubles: all stay below 2**53."""
_SMALL: Final = 2**21
"""A segment of this size holds the blocks of small requests."""
CATEGORIES: Final = {
    "parameters": "parameter",
    "gradients": "gradient",
    "optimizer_states": "optimizer_state",
    "saved_activations": "activation",
    "temporaries": "temporary",
    "buffers": "unknown",
    ALLOCATOR: "unknown",
}
"""The names that torch.profiler has for components (torch/profiler/_memory_profiler.py, Category)."""


def snapshot_bytes(timeline: Timeline) -> bytes:
    """Return the pickle of a timeline's snapshot."""
    return pickle.dumps(snapshot(timeline), protocol=PROTOCOL)


def snapshot(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as torch.cuda.memory._snapshot() returns a process: on device 0, with all events of the step."""
    written = _Snapshot(timeline)
    return {"segments": list(written.segments()), "device_traces": [list(written.events())]}


class _Snapshot:
    """The parts of a snapshot that events and blocks share."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        streams = dict.fromkeys(part.stream for part in (*timeline.segments, *timeline.blocks))
        self.streams = {stream: i for i, stream in enumerate(sorted(streams, key=lambda one: one != "default"))}
        self.frames: dict[tuple[str, str, int | None], list[dict[str, Any]]] = {}

    def frames_of(self, block: Block) -> list[dict[str, Any]]:
        """Return a stack for a block: its name, and the part of the step that allocates it. Equal stacks are one object."""
        key = block.name, block.phase, block.micro_batch
        if key not in self.frames:
            where = block.phase or "before the step"
            if block.micro_batch is not None:
                where += f" of micro-batch {block.micro_batch + 1}"
            self.frames[key] = [{"filename": where, "line": 0, "name": block.name}]
        return self.frames[key]

    # --- events

    def events(self) -> Iterator[dict[str, Any]]:
        reserved: dict[int, list[Segment]] = defaultdict(list)
        given_back: dict[int, list[Segment]] = defaultdict(list)
        for segment in self.timeline.segments:
            if segment.begin:
                reserved[segment.begin].append(segment)
            if segment.end is not None:
                given_back[segment.end].append(segment)
        moments: list[tuple[Block, bool] | None] = [None] * (self.timeline.events + 1)
        for block in self.timeline.blocks:
            if block.begin:
                moments[block.begin] = block, True
            if block.end is not None:
                moments[block.end] = block, False
        for moment, happens in enumerate(moments):
            for segment in reserved[moment]:
                yield self._segment_event("segment_alloc", segment, moment)
            if happens is not None:
                block, comes = happens
                for action in ("alloc",) if comes else ("free_requested", "free_completed"):
                    yield self._event(action, block, moment)
            for segment in given_back[moment]:
                yield self._segment_event("segment_free", segment, moment)
        yield {
            "action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": self.timeline.events, "frames": [],
            "category": "unknown",
        }  # fmt: skip

    def _event(self, action: str, block: Block, moment: int) -> dict[str, Any]:
        return {
            "action": action,
            "addr": _FIRST_ADDRESS + block.address,
            "size": block.nbytes,
            "stream": self.streams[block.stream],
            "time_us": moment,
            "frames": self.frames_of(block),
            "category": CATEGORIES[block.component],
        }

    def _segment_event(self, action: str, segment: Segment, moment: int) -> dict[str, Any]:
        return {
            "action": action,
            "addr": _FIRST_ADDRESS + segment.address,
            "size": segment.size,
            "stream": self.streams[segment.stream],
            "time_us": moment,
            "frames": [],
        }

    # --- segments

    def segments(self) -> Iterator[dict[str, Any]]:
        """Yield the segments at the end of the step. Their blocks leave no gap."""
        left = sorted((block for block in self.timeline.blocks if block.end is None), key=lambda one: one.address)
        rest = iter(left)
        block = next(rest, None)
        for segment in sorted(self.timeline.segments, key=lambda one: one.address):
            if segment.end is not None:
                continue
            own: list[Block] = []
            while block is not None and block.address < segment.address + segment.size:
                own.append(block)
                block = next(rest, None)
            allocated = sum(one.size for one in own)
            yield {
                "device": _DEVICE,
                "address": _FIRST_ADDRESS + segment.address,
                "total_size": segment.size,
                "allocated_size": allocated,
                "active_size": allocated,
                "requested_size": sum(one.nbytes for one in own),
                "stream": self.streams[segment.stream],
                "segment_type": "small" if segment.size == _SMALL else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": list(self._blocks(segment, own)),
            }

    def _blocks(self, segment: Segment, own: list[Block]) -> Iterator[dict[str, Any]]:
        at = segment.address
        for block in own:
            if block.address > at:
                yield _free(at, block.address - at)
            yield {
                "address": _FIRST_ADDRESS + block.address,
                "size": block.size,
                "requested_size": block.nbytes,
                "state": "active_allocated",
                "frames": self.frames_of(block),
            }
            at = block.address + block.size
        if at < segment.address + segment.size:
            yield _free(at, segment.address + segment.size - at)


def _free(address: int, size: int) -> dict[str, Any]:
    return {"address": _FIRST_ADDRESS + address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
