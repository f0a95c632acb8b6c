"""The trace: slices nest, counters are the timeline's bytes, and no collective is missing."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest
from crossed import crossed
from pictured import SETUPS, pictured

from memcalc.pictures.clock import clock_of
from memcalc.pictures.lanes import AT_END, IN_LAYER, sent_of
from memcalc.pictures.notes import micro_batches_of
from memcalc.pictures.trace import trace, trace_bytes

H100 = "h100-80gb"
REQUIRED = {"X": {"pid", "tid", "name", "ts", "dur"}, "C": {"pid", "name", "ts", "args"}, "i": {"pid", "tid", "name", "ts", "s"},
            "M": {"pid", "name", "args"}}  # fmt: skip


def of(name: str, gpu: str | None = H100) -> dict[str, Any]:
    report, timeline = pictured(name, gpu)
    return json.loads(trace_bytes(timeline, report, compressed=False))


@pytest.mark.parametrize(("name", "gpu"), crossed(list(SETUPS), [None, H100]))
def test_slices_of_a_lane_nest(name: str, gpu: str | None) -> None:
    lanes: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in of(name, gpu)["traceEvents"]:
        assert REQUIRED[event["ph"]] <= set(event)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in lanes.values():
        open_: list[float] = []
        for begin, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_ and open_[-1] <= begin + 1e-6:
                open_.pop()
            assert not open_ or end <= open_[-1] + 1e-6
            open_.append(end)


@pytest.mark.parametrize("name", ["none", "deepspeed 3", "megatron, stages"])
def test_counters_are_the_timelines_bytes(name: str) -> None:
    _, timeline = pictured(name, H100)
    events = of(name)["traceEvents"]
    counted = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counted[event["name"]].append(event["args"])
    assert [one["allocated"] for one in counted["allocated bytes"]] == timeline.allocated()
    assert [sum(one.values()) for one in counted["live bytes by component"]] == timeline.allocated()
    assert max(one["reserved"] for one in counted["reserved bytes"]) == max(timeline.reserved())
    (peak,) = (event for event in events if event["ph"] == "i")
    assert peak["args"]["1"].endswith(f"({timeline.alive_at(timeline.peak_event)[0].component})")


@pytest.mark.parametrize("gpu", [None, H100])
@pytest.mark.parametrize("name", SETUPS)
def test_no_collective_is_left_out(name: str, gpu: str | None) -> None:
    """As many calls as the micro-batches that are shown have; all of them where that cannot be told."""
    report, timeline = pictured(name, gpu)
    lanes = sent_of(timeline, report, clock_of(timeline, report))
    assert list(lanes) == list(dict.fromkeys(collective.axis for collective in report.collectives))
    calls = Counter[Any]()
    for lane in lanes.values():
        for sent, after in pairwise(lane):
            assert sent.begin + sent.microseconds <= after.begin + 1e-6
        for sent in lane:
            calls[sent.collective] += sent.calls
            assert sent.known == (gpu is not None)
    shown, whole = micro_batches_of(timeline, report), report.setup.micro_batches
    for collective in report.collectives:
        assert calls[collective] in (collective.calls, collective.calls * shown // whole)


def test_a_layers_collective_is_in_its_layer() -> None:
    report, timeline = pictured("megatron", H100)
    clock = clock_of(timeline, report)
    sent = [one for one in sent_of(timeline, report, clock)["tp"] if one.collective.name == "input of mlp.linear_fc1"]
    parts = [part for part in timeline.layers if part.phase == "forward"]
    assert [one.place for one in sent] == [IN_LAYER] * len(parts)
    assert sent[0].begin >= clock.at[parts[0].first]


def test_a_place_that_is_not_known_is_said() -> None:
    events = of("ddp")["traceEvents"]
    places = {event["args"]["place"] for event in events if "place" in event.get("args", {})}
    assert places == {AT_END}


def test_gradients_that_are_reduced_once_are_in_the_last_backward() -> None:
    report, timeline = pictured("fsdp2, clipping", H100)
    clock = clock_of(timeline, report)
    (reduced,) = (one for one in report.collectives if one.name == "gradients, layers")
    sent = [one for one in sent_of(timeline, report, clock)["dp"] if one.collective is reduced]
    last = [span for span in timeline.spans if span.phase == "backward"][-1]
    assert len(sent) == 12
    assert all(one.begin >= clock.at[last.first] for one in sent)


def test_it_says_what_it_is() -> None:
    with_time, without = (" ".join(of("ddp", gpu)["otherData"].values()) for gpu in (H100, None))
    assert "as long as their kernels" in with_time
    assert "not time" in without
    assert "3 of 4 micro-batches are shown" in without


def test_compressed_it_is_the_same() -> None:
    report, timeline = pictured("none")
    plain, packed = (trace_bytes(timeline, report, compressed=compressed) for compressed in (False, True))
    assert gzip.decompress(packed) == plain
    assert len(packed) < len(plain) / 5
    assert trace(timeline, report) == json.loads(plain)
