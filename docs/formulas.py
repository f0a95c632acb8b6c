"""docs/formulas.md: the rows of representative setups, each with its formula in named dims, its basis and its source."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import memcalc


class Chapter(NamedTuple):
    """A setup, what is said above its rows, and which components of it are shown."""

    title: str
    command: str
    model: str | None
    options: dict[str, Any]
    shows: tuple[str, ...]
    why: str


STATES = ("parameters", "gradients", "optimizer_states")
CHAPTERS = (
    Chapter(
        "Model states of a bare size", "--params 7B", None, {"params": "7B"}, STATES,
        "Sixteen bytes per parameter under mixed precision with Adam: two of weights, two of gradients, twelve of states.",
    ),
    Chapter(
        "One GPU: weights, saved activations and the loss", "-m llama-7b", "llama-7b", {},
        ("parameters", "saved_activations", "temporaries"),
        "Plain PyTorch and transformers. DDP, FSDP2 and DeepSpeed run the same module.",
    ),
    Chapter(
        "Eager attention", "-m llama-7b --attention eager", "llama-7b", {"attention": "eager"}, ("saved_activations",),
        "The scores of all heads are tensors, and softmax keeps its result.",
    ),
    Chapter(
        "Full recomputation", "-m llama-7b --recompute full", "llama-7b", {"recompute": "full"}, ("saved_activations",),
        "Each layer keeps its input and runs again in backward.",
    ),
    Chapter(
        "Autocast", "-m llama-7b --precision bf16-autocast", "llama-7b", {"precision": "bf16-autocast"},
        ("parameters", "saved_activations"), "Weights are fp32. Autocast keeps 16-bit copies of them until backward.",
    ),
    Chapter(
        "DDP", "-m llama-7b --gpus 8", "llama-7b", {"gpus": 8}, ("buffers",),
        "DDP adds buckets, which are a copy of the gradients, and one all-reduce a bucket.",
    ),
    Chapter(
        "DeepSpeed, ZeRO-2", "-m llama-7b --gpus 8 --zero 2", "llama-7b", {"gpus": 8, "zero": 2}, (*STATES, "buffers"),
        "Gradients and optimizer states are partitions of one flat buffer.",
    ),
    Chapter(
        "DeepSpeed, ZeRO-3", "-m llama-7b --gpus 8 --zero 3", "llama-7b", {"gpus": 8, "zero": 3}, (*STATES, "buffers"),
        "Every weight is sharded by itself; what is gathered at the peak is a buffer.",
    ),
    Chapter(
        "FSDP2", "-m llama-7b --gpus 8 --engine fsdp2", "llama-7b", {"gpus": 8, "engine": "fsdp2"}, (*STATES, "buffers"),
        "fp32 shards, each cut along its first dim. A unit is a layer, or all outside the layers.",
    ),
    Chapter(
        "Megatron: tensor parallel with sequence parallelism", "-m llama-7b --gpus 8 --tp 4", "llama-7b",
        {"gpus": 8, "tp": 4}, (*STATES, "saved_activations", "buffers"),
        "A rank has a quarter of the heads and of the feed-forward width, and between the layers a quarter of the sequence.",
    ),
    Chapter(
        "Megatron: experts over ranks", "-m mixtral-8x7b --gpus 8 --ep 8", "mixtral-8x7b", {"gpus": 8, "ep": 8},
        ("parameters", "saved_activations"), "Each rank has one expert of a layer, and receives its tokens.",
    ),
)  # fmt: skip

HEAD = """# Formula book

Written by `docs/generate.py` from reports. Each section is one setup and lists the rows of its report that are larger than a
thousandth of the largest one. A formula is written in [named dims](legend.md), then with the numbers.
`memcalc estimate … --rows` prints all rows of any setup. The [glossary](glossary.md#basis-of-a-row) explains the basis of a row.
"""


def page() -> str:
    """The text of docs/formulas.md."""
    return "\n".join([*HEAD.splitlines(), *(line for chapter in CHAPTERS for line in _lines(chapter))]) + "\n"


def _lines(chapter: Chapter) -> Iterator[str]:
    report = memcalc.estimate(chapter.model, **chapter.options)
    yield from (
        "",
        f"## {chapter.title}",
        "",
        chapter.why,
        "",
        "```sh",
        f"memcalc estimate {chapter.command} --rows",
        "```",
        "",
    )
    shown = [item for item in report.items if item.component in chapter.shows]
    yield from ("| component | row | formula | bytes | basis |", "|---|---|---|---|---|")
    for item in _large(shown):
        name = item.component.replace("_", " ")
        yield f"| {name} | `{item.name}` | {item.formula} | {item.nbytes:,} | {item.basis} |"
    if report.collectives:
        yield from (
            "",
            "| axis | collective | what | formula of the payload | payload | wire | basis |",
            "|---|---|---|---|---|---|---|",
        )
        for c in report.collectives:
            head = f"{c.axis} | {c.collective}, {c.phase} | {c.name}"
            yield f"| {head} | {c.formula} | {c.payload:,} | {c.wire:,} | {c.basis} |"
    yield ""
    sources = dict.fromkeys([item.source for item in _large(shown)] + [c.source for c in report.collectives])
    yield from textwrap.wrap(
        f"Sources: {' · '.join(source for source in sources if source)}.", 120, break_on_hyphens=False
    )


def _large(items: Iterable[Any]) -> list[Any]:
    """The rows that are not a thousand times smaller than the largest."""
    kept = list(items)
    most = max((item.nbytes for item in kept), default=0)
    return [item for item in kept if 1000 * item.nbytes >= most]
