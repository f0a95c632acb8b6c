"""docs/json.md has every key of a real document, and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import schema

import memcalc
from memcalc.decisions.deepspeed_table import deepspeed_tables
from memcalc.decisions.fit import fit
from memcalc.decisions.ladder import ladder

SETUPS: list[tuple[Any, dict[str, Any]]] = [
    ("llama-7b", {}),
    ("llama-7b", {"gpus": 8, "zero": 3, "gpu": "a100-80gb"}),
    ("llama-7b", {"gpus": 8, "gpu": "rtx4090"}),
    ("llama-2-70b", {"gpus": 64, "tp": 8, "pp": 4, "gpu": "h100-80gb"}),
    ("llama-7b", {"gpus": 8, "cp": 2, "engine": "fsdp2"}),
]


def paths(value: Any, path: str = "") -> Iterator[str]:
    """The keys of a document with those around them; `[]` is each element of a list."""
    if isinstance(value, dict):
        for key, part in value.items():
            name = f"{path}.{key}" if path else key
            yield name
            yield from paths(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from paths(part, f"{path}[]")


SETUPS += [
    ("gpt2", {"gpus": 2, "zero": 2, "offload_optimizer": "cpu"}),
    ("llama-7b", {"task": "grpo", "micro_batch_size": 8, "seq_len": 64}),
    (None, {"params": "7B", "gpus": 8, "zero": 2, "gpu": "h100-80gb"}),
]


@cache
def documents() -> list[dict[str, Any]]:
    return [memcalc.estimate(model, **options).to_dict() for model, options in SETUPS]


@cache
def real() -> set[str]:
    return {path for document in documents() for path in paths(document)}


def test_paths() -> None:
    assert list(paths({"a": [{"b": 1}, {"b": {}}], "c": None})) == ["a", "a[].b", "a[].b", "c"]


def test_every_key_is_described() -> None:
    described = {*schema.described(), *schema.setup_keys()}
    assert {path for path in real() if path not in described and path != "setup"} == set()


def test_every_described_key_is_there() -> None:
    assert set(schema.described()) - real() == set()


@pytest.mark.parametrize("key", ["memory.phases", "memory.at_peak", "fit"])
def test_a_key_that_is_not_described_is_missed(key: str) -> None:
    assert key in real() and key in schema.described()
    assert f"{key}.new" not in schema.described()


def test_the_page_lists_every_key_once() -> None:
    page = schema.page(documents()[0]["setup"])
    for path in real() - {"setup"}:
        assert page.count(f"| `{path}` |") == 1, path


AS_ABOVE = ("model", "setup", "memory", "communication", "time", "fit", "advice")


def compared() -> list[dict[str, Any]]:
    options: dict[str, Any] = {"zero": [1, 2], "engine": ["deepspeed", "megatron"], "gpu": "a100-80gb", "price": 2}
    return [memcalc.compare("llama-7b", gpus=8, **options).to_dict()]


def found() -> list[dict[str, Any]]:
    return [fit("micro-batch-size", model, gpu="t4").to_dict() for model in ("gpt2", "llama-7b")]


@pytest.mark.parametrize(
    ("name", "decided", "left_out"),
    [
        ("compare", compared, tuple(f"columns[].{name}" for name in AS_ABOVE)),
        ("compare --deepspeed-table", lambda: [deepspeed_tables("llama-7b", gpus=8).to_dict()], ()),
        (
            "fit --ladder",
            lambda: [ladder("gpt2", gpus=2, gpu="t4").to_dict()],
            (*AS_ABOVE, *(f"ladder[].{name}" for name in (*AS_ABOVE, "adds", "flags"))),
        ),
        ("fit", found, AS_ABOVE),
    ],
)
def test_documents_of_decisions(
    name: str, decided: Callable[[], list[dict[str, Any]]], left_out: tuple[str, ...]
) -> None:
    """Keys inside those of an estimate are left out, as are varied options and the fields of a row."""
    inside = tuple(f"{one}{end}" for one in (*left_out, "columns[].values", "next.row") for end in (".", "[]"))
    keys = {
        path
        for document in decided()
        for path in paths(document)
        if path == "next.row.grows_by" or not path.startswith(inside)
    }
    described = set(schema.DECISIONS[name][1])
    assert keys - described == {"schema_version", *(set(AS_ABOVE) & keys if name.startswith("fit") else ())}
    assert described - keys == set()
    page = schema.page(documents()[0]["setup"])
    for path in described:
        assert f"| `{path}` |" in page
