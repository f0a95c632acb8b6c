"""The drawn schedule: a cell for every action where it runs, and idle times between them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from page_tree import Element, parsed

import memcalc
from memcalc.pictures.html.lanes import schedule
from memcalc.pictures.schedule import lanes

BOX = re.compile(r"M(\d+) (\d+)h(\d+)v(\d+)H(\d+)z")


def drawn(model: str, **options: Any) -> Element:
    made = schedule(memcalc.estimate(model, **options))
    assert made is not None
    return parsed(made)


def boxes(path: Element) -> list[tuple[int, ...]]:
    found = BOX.findall(path.attributes["d"])
    assert "".join(f"M{a} {b}h{c}v{d}H{e}z" for a, b, c, d, e in found) == path.attributes["d"]
    return [tuple(map(int, box)) for box in found]


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "megatron", "schedule": "interleaved", "virtual_stages": 2},
        {"engine": "megatron"},
        {"engine": "fsdp2", "schedule": "zero-bubble", "zero": 2},
    ],
)
def test_every_action_has_a_cell_where_it_runs(options: dict[str, Any]) -> None:
    report = memcalc.estimate("llama-7b", pp=4, gpus=4, global_batch_size=8, **options)
    tree = parsed(schedule(report) or "")
    picture = tree.one("svg", class_="lanes")
    every = lanes(report.setup, 8)
    unit = int(picture.attributes["width"]) // max(lane[-1].end for lane in every)
    own_lanes = [one for one in picture.children if one.tag == "g"]
    assert len(own_lanes) == 4
    for group, lane in zip(own_lanes, every, strict=True):
        cells = {left // unit: (width + 1) // unit for path in group.children if path.attributes["class"].startswith("cell")
                 for left, _, width, _, _ in boxes(path)}  # fmt: skip
        assert cells == {one.start: one.end - one.start for one in lane}
        numbers = sorted(int(one.text) for one in group.all("text"))
        assert numbers == sorted((one.action.micro_batch or 0) + 1 for one in lane)
        idle = sum((width + 1) // unit for _, _, width, _, _ in boxes(group.one("path", class_="idle")))
        assert idle == int(picture.attributes["width"]) // unit - sum(cells.values())


def test_a_long_step_is_cut_and_says_so() -> None:
    tree = drawn("llama-7b", engine="megatron", pp=8, gpus=8, global_batch_size=4096)
    assert "Drawn are 100 of 4096 micro-batches" in tree.text
    assert len(tree.all("text")) < 1700


def test_of_many_ranks_some_are_drawn() -> None:
    tree = drawn("llama-7b", engine="megatron", pp=32, gpus=32, global_batch_size=64)
    names = [one.text for one in tree.one("svg", class_="lane-names").all("text")]
    assert len(names) <= 16
    assert (names[0], names[-1]) == ("rank 0", "rank 31")
    assert f"Of 32 ranks, {len(names)} are drawn." in tree.text


def test_without_stages_there_is_none() -> None:
    assert schedule(memcalc.estimate("gpt2")) is None
    assert schedule(memcalc.estimate(params="7B", pp=2, gpus=2, engine="megatron")) is None
