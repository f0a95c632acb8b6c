"""Comma lists, and switches as options with a value."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.cli.lists import numbers, values_of_words, with_values
from memcalc.errors import InputError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--padded", "--padded on"),
        ("--padded --gpus 8", "--padded on --gpus 8"),
        ("--gpus 8 --no-sequence-parallel", "--gpus 8 --sequence-parallel off"),
        ("--sequence-parallel on,off -g 8", "--sequence-parallel on,off -g 8"),
        ("--padded llama-7b", "--padded on llama-7b"),
        ("--padded=on,off", "--padded=on,off"),
        ("--zero 1,2", "--zero 1,2"),
        ("", ""),
    ],
)
def test_switches(given: str, expected: str) -> None:
    assert with_values(given.split()) == expected.split()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("gpus", "8", 8),
        ("gpus", "8,16, 32", [8, 16, 32]),
        ("gpus", "8,8", 8),
        ("gpus", "8,x", [8, "x"]),
        ("seq_len", "2k,4096,1M", [2048, 4096, 2**20]),
        ("padded", "on,off", [True, False]),
        ("padded", "maybe", "maybe"),
        ("engine", "ddp,fsdp2", ["ddp", "fsdp2"]),
        ("network_gbps", "100,400", [100.0, 400.0]),
        ("model", "gpt2,llama-7b", ["gpt2", "llama-7b"]),
    ],
)
def test_values(name: str, text: str, value: Any) -> None:
    assert values_of_words({name: text, "zero": None, "help_all": False}) == {name: value}


def test_a_path_may_have_a_comma(tmp_path: Any) -> None:
    path = tmp_path / "one,two"
    path.mkdir()
    assert values_of_words({"model": str(path)}) == {"model": str(path)}


@pytest.mark.parametrize("text", ["", ",", "8,", ",8", "8,,16"])
def test_an_empty_value(text: str) -> None:
    with pytest.raises(InputError, match=r"^--gpus .*a value is empty"):
        values_of_words({"gpus": text})


def test_numbers() -> None:
    assert numbers("price", None) is None
    assert numbers("price", "2,4.5,x") == [2.0, 4.5, "x"]
