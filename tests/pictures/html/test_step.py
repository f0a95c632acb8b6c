"""The timeline in the page: what it carries for the script and shows without one is the timeline's."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
from page_tree import Element, exact, parsed, table_cells

import memcalc
from memcalc.pictures.html.columns import Changes, Key
from memcalc.pictures.html.step import STACKED, step
from memcalc.pictures.html.step_data import data_block
from memcalc.pictures.html.step_plot import areas, band, grid, span_words
from memcalc.pictures.timeline import Span, Timeline, timeline_of

SETUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("gpt2", {}),
    "zero 3": ("llama-7b", {"zero": 3, "gpus": 8, "gpu": "a100-40gb"}),
    "accumulation": ("gpt2", {"engine": "ddp", "gpus": 2, "global_batch_size": 16}),
    "pipeline": ("llama-7b", {"engine": "megatron", "pp": 8, "gpus": 8, "global_batch_size": 256}),
}
ALL = pytest.mark.parametrize("name", SETUPS)


@cache
def timeline(name: str) -> Timeline:
    model, options = SETUPS[name]
    return timeline_of(memcalc.estimate(model, **options))


@cache
def tree(name: str) -> Element:
    model, options = SETUPS[name]
    return parsed(step(memcalc.estimate(model, **options)))


def data(name: str) -> dict[str, Any]:
    return json.loads(tree(name).one("script", type="application/json").text)


@ALL
def test_the_data_have_the_peak(name: str) -> None:
    carried, made = data(name), timeline(name)
    moments = list(accumulate(carried["moments"]))
    assert moments[carried["peak"]] == made.peak_event
    assert carried["last"] == made.events

    def at(column: int) -> int:
        total = 0
        for _, _, columns, nbytes in carried["alive"]:
            before = [size for first, size in zip(accumulate(columns), nbytes, strict=True) if first <= column]
            total += before[-1] if before else 0
        return total

    totals = made.allocated()
    assert at(carried["peak"]) == made.peak
    for column in range(0, len(moments), 41):
        assert at(column) == totals[moments[column]]
    assert {component for component, *_ in carried["alive"]} <= set(range(len(STACKED)))


@ALL
def test_the_table_is_what_is_alive_at_the_peak(name: str) -> None:
    made = timeline(name)
    *lines, total = table_cells(tree(name).one("table"))
    assert exact(total[1]) == sum(exact(line[1]) for line in lines) == made.peak
    assert [int(line[3].text.replace(",", "")) for line in lines] == [exact(line[1]) for line in lines]
    largest = [exact(line[1]) for line in lines[:15]]
    assert largest == sorted(largest, reverse=True)


@ALL
def test_the_legend_adds_up_to_the_peak(name: str) -> None:
    entries = [one for one in tree(name).all("li") if "data-component" in one.attributes]
    assert sum(exact(one) for one in entries) == timeline(name).peak
    live = timeline(name).live()
    for one in entries:
        assert exact(one) == live[one.attributes["data-component"]][timeline(name).peak_event]


@ALL
def test_the_areas_have_the_heights_of_the_components(name: str) -> None:
    """The highest point of the topmost area is the peak's."""
    paths = [one for one in tree(name).one("svg", class_="areas").children if one.tag == "path"]
    top = re.fullmatch(r"M0 1000V(\d+)((?:h\d+v-?\d+)*)h(\d+)V1000z", paths[0].attributes["d"])
    assert top is not None
    heights = list(accumulate(map(int, re.findall(r"v(-?\d+)", top[2])), initial=int(top[1])))
    width = sum(map(int, re.findall(r"h(\d+)", top[2]))) + int(top[3])
    assert width == len(data(name)["moments"])
    assert 1000 - min(heights) == pytest.approx(1000 / 1.08, abs=1) or timeline(name).capacity is not None


@ALL
def test_the_band_has_every_span(name: str) -> None:
    drawn = [one.text for one in tree(name).one("g", class_="band").all("title")]
    assert drawn == [span_words(span) for span in timeline(name).spans]


@ALL
def test_the_data_have_every_span(name: str) -> None:
    carried = data(name)
    assert [
        (carried["phases"][phase], number or None, chunk, *ends) for phase, number, chunk, *ends in carried["spans"]
    ] == [
        (span.phase, None if span.micro_batch is None else span.micro_batch + 1, span.chunk, span.first, span.last)
        for span in timeline(name).spans
    ]


def test_a_band_of_many_spans_has_a_path_for_each_kind() -> None:
    spans = [Span(("forward", "backward")[i % 2], i // 2, 0, None, 10 * i, 10 * i + 10) for i in range(400)]
    tree = parsed(band([*spans, Span("step", None, 0, None, 4000, 4000)], 4001))
    assert tree.all("text") == []
    forward, backward, step = tree.all("path")
    assert [one.attributes["class"] for one in (forward, backward, step)] == ["cell-f", "cell-b", "cell-s"]
    assert forward.attributes["d"].startswith("M0 0h10v1h-10zM20 0h10")
    assert step.attributes["d"] == "M3985 0h16v1h-16z"  # wide enough to be seen
    assert tree.one("svg").attributes["viewbox"] == "0 0 4001 1"


def test_names_of_spans() -> None:
    assert span_words(Span("forward", 0, 0, None, 0, 5)) == "forward of micro-batch 1"
    assert span_words(Span("backward", 2, 1, None, 0, 5)) == "backward of micro-batch 3, chunk 2"
    assert span_words(Span("step", None, 0, None, 0, 5)) == "optimizer step"
    assert span_words(Span("backward", None, 0, None, 0, 5)) == "backward"


def test_areas_by_hand() -> None:
    stack = [
        ("parameters", [Changes(Key("parameters", "a"), [0], [50])]),
        ("buffers", [Changes(Key("buffers", "b"), [1, 2], [50, 0])]),
    ]
    upper, lower = [one.attributes["d"] for one in parsed(areas(stack, 4, 100)).all("path")]
    assert lower == "M0 1000V500h4V1000z"
    assert upper == "M0 1000V500h1v-500h1v500h2V1000z"


def test_the_grid_has_round_sizes_and_the_capacity() -> None:
    drawn = parsed(grid(30 * 2**30, 24 * 2**30))
    assert [one.text for one in drawn.all("text")] == ["8 GiB", "16 GiB", "24 GiB", "GPU: 24.00 GiB"]
    assert len(drawn.all("line", class_="limit")) == 1


def test_what_has_no_timeline_says_so() -> None:
    states = parsed(step(memcalc.estimate(params="7B")))
    assert "not known without a model" in states.text
    unknown = parsed(step(memcalc.estimate("llama-7b", engine="deepspeed", pp=4, gpus=8, global_batch_size=16)))
    assert "no timeline" in unknown.text
    for tree in (states, unknown):
        assert tree.all("svg") == tree.all("script") == []


def test_data_cannot_end_their_element() -> None:
    name = "</script><!--<script>&amp;"
    made = timeline("plain")
    text = data_block(made, [made.peak_event], [Changes(Key("buffers", name), [0], [1])], STACKED)
    (script,) = parsed(text).all("*")
    assert json.loads(script.text)["alive"] == [[STACKED.index("buffers"), name, [0], [1]]]
    assert not set("<>&") & set(script.text)
