"""Whatever a file holds, loading it ends soon with a mapping or with one line."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from memcalc import InputError
from memcalc.formats.loading import load

CYCLE = "a: &a\n  b: *a\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def loaded(folder: Path, name: str, content: str | bytes) -> Any:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load("--deepspeed", path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '{"a": {"b": [1, 2.5, "x", true, null]}}'),
        ("a.yaml", "a:\n  b: [1, 2.5, x, yes, null]\n"),
        ("a.yml", "\ufeffa: {b: [1, 2.5, x, True, ~]}"),
        ("a.toml", '[a]\nb = [1, 2.5, "x", true]'),
        ("a", '{"a": {"b": [1, 2.5, "x", true, null]}}'),
        ("a.cfg", "a:\n  b: [1, 2.5, x, on, ]\n"),
    ],
)
def test_each_format_is_one_mapping(name: str, content: str, tmp_path: Path) -> None:
    file, found = loaded(tmp_path, name, content)
    assert file == name
    assert found["a"]["b"][:4] == [1, 2.5, "x", True]


def test_yaml_reads_as_the_tools_read_it(tmp_path: Path) -> None:
    _, found = loaded(tmp_path, "a.yaml", "a: NO\nb: 5e7\nc: 2e-5\nd: 1_000\ne: 'no'")
    assert found == {"a": False, "b": "5e7", "c": "2e-5", "d": 1000, "e": "no"}


def test_a_mapping_is_taken_as_it_is() -> None:
    assert load("--deepspeed", {"a": 1}) == ("", {"a": 1})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "{", "not valid JSON"),
        ("a.json", "", "not valid JSON"),
        ("a.json", "[1]", "holds a list"),
        ("a.json", '{"a": 1, "a": 2}', "the key a is there twice"),
        ("a.json", '{"a":' * 100_000, "not valid JSON"),
        ("a.json", "[" * 100_000, "not valid JSON"),
        ("a.yaml", "", "holds nothing"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.yaml", "a: b: c", "line 1"),
        ("a.yaml", "[" * 100_000, "not valid YAML"),
        ("a.yaml", "- " * 5_000 + "x", "too deep"),
        ("a.yaml", "? [1, 2]\n: 3", "not valid YAML"),
        ("a.yaml", "!!python/object:os.system {}", "not valid YAML"),
        ("a.yaml", "a: !!int x", "not valid YAML"),
        ("a.yaml", "null: 1", "is not a name"),
        ("a.yaml", CYCLE, "too deep or too large"),
        ("a.yaml", BOMB, "too deep or too large"),
        ("a.toml", "a = ", "not valid TOML"),
        ("a.toml", "a = [" + "[" * 100_000, "not valid TOML"),
        ("a.json", b"\xff\xfe\x00\x01", "not UTF-8"),
        ("a.yaml", b"a: \x00", "not valid YAML"),
        ("a.json", "x" * (2**20 + 1), "larger than 1 MiB"),
        ("a.json", '{"a": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
    ids=range(23),
)
def test_what_is_no_mapping_is_refused_in_a_line_and_soon(
    name: str, content: str | bytes, words: str, tmp_path: Path
) -> None:
    start = time.process_time()
    with pytest.raises(InputError, match=words) as caught:
        loaded(tmp_path, name, content)
    assert time.process_time() - start < 2  # a bomb or a cycle would go on for hours
    assert str(caught.value).startswith("--deepspeed ")
    assert str(caught.value).isprintable()


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, "a\0b"):
        with pytest.raises(InputError, match="cannot be read"):
            load("--deepspeed", path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.json")


@pytest.mark.parametrize("name", ["a.json", "a.yaml", "a.toml", "a"])
def test_truncated_and_damaged_files(name: str, tmp_path: Path) -> None:
    text = b'{"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}, "fp16": {"enabled": "auto"}}'
    chance = random.Random(7)
    for _ in range(300):
        content = bytearray(text[: chance.randrange(len(text) + 1)])
        for _ in range(chance.randrange(4)):
            content[chance.randrange(len(content) or 1) : 0] = bytes([chance.randrange(256)])
        try:
            loaded(tmp_path, name, bytes(content))
        except InputError as error:
            assert str(error).isprintable()


def test_an_empty_path_is_no_folder() -> None:
    with pytest.raises(InputError, match=r"^--deepspeed '': expected the path"):
        load("--deepspeed", "")


@pytest.mark.parametrize(
    ("option", "words"),
    [("--torchtitan", "configurations in Python"), ("--accelerate", "allowed: a file of JSON, YAML or TOML")],
)
def test_a_program_is_refused_by_what_is_read_instead(option: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(
        "def llama3_8b():\n    return Trainer.Config(training=TrainingConfig(steps=10))\n", encoding="utf-8"
    )
    with pytest.raises(InputError) as error:
        load(option, path)
    assert words in str(error.value) and "\n" not in str(error.value)
