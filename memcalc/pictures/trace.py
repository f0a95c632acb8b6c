"""A timeline as a trace for Perfetto and chrome://tracing: compute, communication by axis, and bytes as counters.

The format is Chrome's JSON: times in microseconds, complete slices ("X"), instants ("i"), counters ("C") and names ("M").
Slices of one lane (tid) nest. Source: perfetto.dev/docs/getting-started/other-formats.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any, Final

from memcalc.pictures.clock import clock_of
from memcalc.pictures.lanes import sent_of
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from memcalc.estimation.report import Report
    from memcalc.pictures.clock import Clock
    from memcalc.pictures.lanes import Sent
    from memcalc.pictures.timeline import Span, Timeline

_COMPUTE: Final = 1
"""The lane of forwards, backwards and the optimizer's step. The axes follow."""
_MOST_SAMPLES: Final = 10_000
"""A counter has at most twice as many samples: the least and the most of each stretch of moments."""
_LARGEST: Final = 20
"""How many blocks the peak's slice names."""


def trace_bytes(timeline: Timeline, report: Report, *, compressed: bool) -> bytes:
    """Return the JSON of a timeline's trace, compressed by gzip if asked."""
    text = json.dumps(trace(timeline, report), ensure_ascii=False, separators=(",", ":")).encode()
    return gzip.compress(text, mtime=0) if compressed else text


def trace(timeline: Timeline, report: Report) -> dict[str, Any]:
    """Return the trace of a report's timeline."""
    clock = clock_of(timeline, report)
    lanes = sent_of(timeline, report, clock)
    notes = [
        clock.words,
        "a lane of an axis sends one collective after the other, and compute does not wait",
        *timeline.notes,
    ]
    samples = _samples(timeline)
    if len(samples) <= timeline.events:
        notes.append(
            f"counters have {len(samples)} of {timeline.events + 1} moments, the highest and lowest of each stretch"
        )
    pid = timeline.rank
    events: list[dict[str, Any]] = [
        *_names(pid, timeline, lanes),
        *(_slice(pid, span, clock) for span in timeline.spans if span.last > span.first),
        *(_slice(pid, part, clock) for part in timeline.layers),
        _peak(pid, timeline, clock),
        *_sent(pid, lanes),
        *_counters(pid, timeline, clock, samples),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {f"note {i}": note for i, note in enumerate(notes, 1)},
    }


def _names(pid: int, timeline: Timeline, lanes: Iterable[str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"pipeline rank {timeline.rank}"}}
    for tid, name in enumerate(("compute", *(f"communication over {axis}" for axis in lanes)), _COMPUTE):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _slice(pid: int, span: Span, clock: Clock) -> dict[str, Any]:
    """Return the slice of a span, or of a layer within one."""
    begin, end = clock.at[span.first], clock.at[span.last]
    name = "optimizer step" if span.phase == "step" else span.phase if span.layer is None else f"layer {span.layer}"
    args: dict[str, Any] = {"phase": span.phase, "allocations and frees": span.last - span.first}
    if span.micro_batch is not None:
        args["micro-batch"] = span.micro_batch + 1
        name += f" {span.micro_batch + 1}" if span.layer is None else ""
    return _complete(pid, _COMPUTE, name, span.phase, begin, end - begin, args)


def _complete(
    pid: int, tid: int, name: str, category: str, begin: float, length: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category, "ts": round(begin, 3),
        "dur": round(round(begin + length, 3) - round(begin, 3), 3), "args": dict(args),
    }  # fmt: skip


def _peak(pid: int, timeline: Timeline, clock: Clock) -> dict[str, Any]:
    """Return the mark of the peak, with the largest blocks that are alive there."""
    alive = {f"{i}": f"{show_bytes(one.size)} {one.name} ({one.component})" for i, one in
             enumerate(timeline.alive_at(timeline.peak_event)[:_LARGEST], 1)}  # fmt: skip
    return {
        "ph": "i", "pid": pid, "tid": _COMPUTE, "name": f"peak: {show_bytes(timeline.peak)}", "s": "p", "cat": "memory",
        "ts": round(clock.at[timeline.peak_event], 3), "args": alive,
    }  # fmt: skip


def _sent(pid: int, lanes: Mapping[str, list[Sent]]) -> Iterator[dict[str, Any]]:
    for tid, sent in enumerate(lanes.values(), _COMPUTE + 1):
        for one in sent:
            c = one.collective
            args = {
                "calls": one.calls,
                "payload": f"{round(c.payload * one.share)} B",
                "wire": f"{round(c.wire * one.share)} B",
                "ranks": c.group_size,
                "dtype": c.dtype,
                "can hide behind": c.overlap,
                "place": one.place,
                "time": "as docs/communication-time.md says" if one.known else "not known: drawn 1 µs long",
            }
            yield _complete(pid, tid, f"{c.collective}: {c.name}", c.phase, one.begin, one.microseconds, args)


def _samples(timeline: Timeline) -> list[int]:
    """Return the moments that counters show: all of them, or the least and the most allocated of each stretch."""
    if timeline.events < 2 * _MOST_SAMPLES:
        return list(range(timeline.events + 1))
    allocated = timeline.allocated()
    size = -(-(timeline.events + 1) // _MOST_SAMPLES)
    out: set[int] = {0, timeline.events}
    for start in range(0, timeline.events + 1, size):
        moments = range(start, min(start + size, timeline.events + 1))
        out |= {min(moments, key=allocated.__getitem__), max(moments, key=allocated.__getitem__)}
    return sorted(out)


def _counters(pid: int, timeline: Timeline, clock: Clock, samples: Iterable[int]) -> Iterator[dict[str, Any]]:
    live, allocated, reserved = timeline.live(), timeline.allocated(), timeline.reserved()
    shown = {component: bytes_ for component, bytes_ in live.items() if any(bytes_)}
    before: dict[str, int] = {}
    for moment in samples:
        ts = round(clock.at[moment], 3)
        args = {component: bytes_[moment] for component, bytes_ in shown.items()}
        yield {"ph": "C", "pid": pid, "name": "live bytes by component", "ts": ts, "args": args}
        total = {"allocated": allocated[moment], "reserved": reserved[moment]}
        if total["reserved"] != before.get("reserved") or moment == timeline.peak_event:
            yield {"ph": "C", "pid": pid, "name": "reserved bytes", "ts": ts, "args": {"reserved": total["reserved"]}}
        yield {"ph": "C", "pid": pid, "name": "allocated bytes", "ts": ts, "args": {"allocated": total["allocated"]}}
        before = total
