"""Contents of torchtitan's files, and what the reader says of them."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.formats.found import Found
from memcalc.formats.torchtitan import read


def found(text: str) -> Found:
    return read("run.toml", tomllib.loads(text))


def options(content: dict[str, Any] | str) -> dict[str, Any]:
    got = found(content) if isinstance(content, str) else read("", content)
    return {name: value.value for name, value in got.options.items()}


def notes(content: dict[str, Any]) -> str:
    """The notes but those on the model and on the open degree."""
    return "\n".join(
        note for note in read("", content).notes if "model.name" not in note and "--gpus leaves" not in note
    )


def refusal(content: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        read("run.toml", content)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("--torchtitan run.toml: ")
    return str(caught.value).removeprefix("--torchtitan run.toml: ")


NO_RECOMPUTATION = {"activation_checkpoint": {"mode": "none"}}


def with_keys(section: str, *others: dict[str, Any], **keys: Any) -> dict[str, Any]:
    out: dict[str, Any] = {**NO_RECOMPUTATION}
    for one in ({section: keys}, *others):
        for name, values in one.items():
            out[name] = {**out.get(name, {}), **values}
    return out
