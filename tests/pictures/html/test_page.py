"""The page: its sums are the report's, it asks for nothing, it is small, and no text is taken for markup."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from typing import Any

import pytest
from command import LLAMA
from page_tree import Element, exact, parsed, table_cells

import memcalc
from memcalc.core.rows import COMPONENTS
from memcalc.estimation.report import PHASES, Report
from memcalc.pictures.html.page import page
from memcalc.report.advice_lines import advised
from memcalc.report.answer import answer_lines
from memcalc.report.communication import layer_line, textbook_lines, time_lines
from memcalc.report.notes import notes
from memcalc.report.title import title_words

SETUPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "zero 3": ("llama-7b", {"zero": 3, "gpus": 8, "gpu": "a100-80gb"}),
    "one gpu": ("gpt2", {"gpu": "rtx4090"}),
    "interleaved": (
        "llama-7b",
        {"engine": "megatron", "tp": 2, "pp": 4, "gpus": 16, "schedule": "interleaved", "virtual_stages": 2,
         "global_batch_size": 32},
    ),
    "experts": ("mixtral-8x7b", {"gpus": 16, "ep": 8, "zero": 1}),
    "zero-bubble": (
        "llama-7b", {"engine": "fsdp2", "pp": 4, "gpus": 8, "schedule": "zero-bubble", "zero": 2, "global_batch_size": 16},
    ),
    "deepspeed stages": ("llama-7b", {"engine": "deepspeed", "pp": 4, "gpus": 8, "global_batch_size": 16}),
    "405b": (
        "llama-3.1-405b", {"gpus": 256, "tp": 8, "pp": 16, "global_batch_size": 256, "gpu": "h100-80gb"},
    ),
    "many micro-batches": ("llama-7b", {"engine": "megatron", "pp": 8, "gpus": 8, "global_batch_size": 4096}),
    "many chunks": (
        "llama-3.1-405b",
        {"engine": "megatron", "pp": 14, "tp": 8, "gpus": 112, "virtual_stages": 9, "schedule": "interleaved",
         "global_batch_size": 140, "pp_rank": 3},
    ),
    "too large": ("llama-7b", {"gpu": "rtx4090"}),
    "states": (None, {"params": "7B", "zero": 2, "gpus": 8, "gpu": "a100-80gb"}),
}  # fmt: skip
ALL = pytest.mark.parametrize("name", SETUPS)


@cache
def report_of(name: str) -> Report:
    model, options = SETUPS[name]
    return memcalc.estimate(**options) if model is None else memcalc.estimate(model, **options)


@cache
def text_of(name: str) -> str:
    return page(report_of(name))


@cache
def tree_of(name: str) -> Element:
    return parsed(text_of(name))


@pytest.mark.slow
@ALL
def test_it_asks_for_nothing_and_is_small(name: str) -> None:
    text, tree = text_of(name), tree_of(name)
    assert len(text.encode()) < 400_000
    for element in tree.all("*"):
        assert element.tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), element
        for attribute, value in element.attributes.items():
            assert attribute not in ("src", "srcset", "style", "ping", "action"), element
            assert not attribute.startswith("on"), element
            if attribute in ("href", "xlink:href"):
                assert value.startswith("#"), element
            if "url(" in value:
                assert value.startswith("url(#"), element
    for element in [*tree.all("style"), *tree.all("script")]:
        assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch|XMLHttp|import\(|eval|innerHTML", _code(element)), (
            element.tag
        )


def _code(element: Element) -> str:
    """The code of a script or a style; no code if it is data."""
    return (
        ""
        if element.attributes.get("type") == "application/json"
        else re.sub(r"^ *// .*", "", element.text, flags=re.M)
    )


@ALL
def test_its_policy_allows_its_own_style_and_scripts_alone(name: str) -> None:
    tree = tree_of(name)
    policy = tree.one("meta", http_equiv="Content-Security-Policy").attributes["content"]
    scripts = [one for one in tree.all("script") if "type" not in one.attributes]
    hashes = {b64encode(sha256(one.text.encode()).digest()).decode() for one in [*tree.all("style"), *scripts]}
    assert policy.startswith("default-src 'none'; ")
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == hashes
    assert "unsafe" not in policy


@ALL
def test_every_name_in_it_is_there_once(name: str) -> None:
    tree = tree_of(name)
    names = [one.attributes["id"] for one in tree.all("*") if "id" in one.attributes]
    assert len(names) == len(set(names))
    used = [word for one in tree.all("*") for key in ("aria-labelledby", "aria-describedby", "aria-controls", "for", "data-for")
            for word in one.attributes.get(key, "").split()]  # fmt: skip
    used += [one.attributes["href"][1:] for one in tree.all("*") if "href" in one.attributes]
    used += re.findall(r'"url\(#([^)]+)\)"', text_of(name))
    assert set(used) <= set(names)


@ALL
def test_every_picture_has_a_title_and_a_description(name: str) -> None:
    for picture in tree_of(name).all("svg"):
        if picture.attributes.get("role") == "img":
            assert picture.children[0].tag == "title"
            assert picture.children[0].text
            assert picture.children[1].tag == "desc"


@ALL
def test_the_head_is_what_the_terminal_says(name: str) -> None:
    report, head = report_of(name), tree_of(name).one("header")
    title, parts = title_words(report)
    assert head.one("h1").text == title
    assert [one.text for one in head.one("ul").all("li")] == parts
    said = " ".join(one.text for one in head.one("div", aria_label="the answer").all("p"))
    assert said in (" ".join(answer_lines(report)), answer_lines(report)[0].replace(": ", " ", 1))
    totals = [exact(one) for one in head.all("dd")]
    capacity = [] if report.gpu is None else [report.gpu.capacity]
    assert totals == [report.peak, report.allocated, report.reserved, report.device, *capacity]


@ALL
def test_the_phases_add_up(name: str) -> None:
    report, section = report_of(name), tree_of(name).one("section", id="memory")
    drawn = [sum(int(part.attributes["data-bytes"]) for part in bar.all("rect")) for bar in _bars(section)]
    assert drawn == [*report.phases.values(), report.device]
    lines = table_cells(section.one("table"))
    for column, phase in enumerate(PHASES, 2):
        *parts, total = [exact(line[column]) for line in lines]
        assert sum(parts) == total == report.phases[phase]
    labels = dict(
        zip(("parameters", "gradients", "optimizer states", "saved activations", "buffers"), COMPONENTS, strict=False)
    )
    for line in lines[:-1]:
        if line[0].text in labels:
            assert exact(line[1]) == report.total(labels[line[0].text])


def _bars(section: Element) -> list[Element]:
    return [one for one in section.all("div") if one.attributes["class"] in ("bar", "bar marked")]


@ALL
def test_every_row_is_there(name: str) -> None:
    report, table = report_of(name), tree_of(name).one("table", id="memory-rows")
    items = [*report.items, *report.overheads]
    lines = table_cells(table)
    assert [(line[0].text, exact(line[2]), exact(line[3])) for line in lines] == [
        (item.name, item.nbytes, item.at_peak) for item in items
    ]
    for line, item in zip(lines, items, strict=True):
        assert [cell.text for cell in line[5:]] == [item.dtype, item.formula, item.basis, item.life, item.source]
        assert all(f"{dim} {length}" in line[4].text for dim, length in item.shape)
    assert sum(exact(line[3]) for line in lines) == report.peak


@ALL
def test_every_collective_is_there(name: str) -> None:
    report, tree = report_of(name), tree_of(name)
    if not report.collectives:
        assert tree.all("table", id="collective-rows") == []
        return
    lines = table_cells(tree.one("table", id="collective-rows"))
    assert [(line[0].text, exact(line[7]), exact(line[8])) for line in lines] == [
        (c.name, c.payload, c.wire) for c in report.collectives
    ]
    assert [line[10].text for line in lines] == [c.formula for c in report.collectives]
    section = tree.one("section", id="communication")
    for kind in ("payload", "wire"):
        whole = sum(getattr(c, kind) for c in report.collectives)
        assert sum(int(one.attributes["data-bytes"]) for one in section.all("rect", class_=kind)) == whole
        column = {"payload": 4, "wire": 5}[kind]
        *parts, total = [exact(line[column]) for line in table_cells(section.one("table"))]
        assert sum(parts) == total == whole


@ALL
def test_the_lines_on_communication(name: str) -> None:
    report, tree = report_of(name), tree_of(name)
    said = [one.text for one in tree.one("section", id="communication").all("p")]
    if report.collectives:
        told = [layer_line(report), *time_lines(report, bracketed=False), *textbook_lines(report)]
        assert said[1:] == [line.plain for line in told]
    else:
        assert len(said) == 1


@ALL
def test_pipeline_ranks(name: str) -> None:
    report, found = report_of(name), tree_of(name).all("section", id="ranks")
    if report.setup.pp == 1:
        assert found == []
        return
    each = report.each_rank()
    drawn = [sum(int(part.attributes["data-bytes"]) for part in bar.all("rect")) for bar in _bars(found[0])]
    assert drawn == [one.peak for one in each]
    lines = table_cells(found[0].one("table"))
    assert [[exact(cell) for cell in line[3:]] for line in lines] == [
        [
            *(one.total(component) for component in COMPONENTS[:-1]),
            one.peak,
            one.device,
            sum(c.wire for c in one.collectives),
        ]
        for one in each
    ]


@ALL
def test_notes_and_advice(name: str) -> None:
    report, tree = report_of(name), tree_of(name)
    told = advised(report)
    if told is None:
        assert tree.all("section", id="advice") == []
    else:
        advice = tree.one("section", id="advice")
        assert [one.text for one in advice.all("code")] == [change.flags for change in told.changes]
        assert [one.text for one in advice.all("dd")] == [line for change in told.changes for line in change.under]
        assert advice.one("p").text.lower() == told.heading.lower()
    said = [one.text for section in tree.all("section", id="notes") for one in section.all("li")]
    assert set(notes(report)) <= set(said)


@ALL
def test_the_links_lead_to_all_parts(name: str) -> None:
    tree = tree_of(name)
    links = [one.attributes["href"][1:] for one in tree.one("nav").all("a")]
    assert links == [one.attributes["id"] for one in tree.one("main").all("section")]


NASTY = """</script><script>alert('1')</script>"><img src=x onerror='alert(2)'>&lt;"""


def test_a_name_is_never_markup() -> None:
    model = memcalc.load_model(LLAMA)
    model.name = NASTY
    report = memcalc.estimate(model)
    tree = parsed(page(report))
    assert tree.one("h1").text == NASTY
    assert tree.one("head").one("title").text.startswith(f"memcalc: {NASTY}")
    assert tree.all("img") == []
    assert len(tree.all("script")) == 3


def test_thousands_of_rows() -> None:
    report = memcalc.estimate("gpt2")
    report.items = report.items * 60  # type: ignore[misc]
    table = parsed(page(report)).one("table", id="memory-rows")
    assert len(table_cells(table)) == len(report.items) + len(report.overheads) > 2000
