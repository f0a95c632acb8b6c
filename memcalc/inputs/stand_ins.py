"""Bundled models that replace Hub repositories out of reach, if the repository's name says that it has the shape of one
of them.

Instruct and chat variants of a model have its shape, and so have copies by another owner under the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from memcalc.inputs.files import read_bundled, specs_folder

_TUNED: Final = ("instruct", "chat", "it")
_PLAIN: Final = ("base", "pt", "hf")
"""Words for a pretrained model. They are ignored only if the name also tells a size: `t5-base` is a size of its own."""

_SIZE: Final = re.compile(r"(\d+x)?\d+(\.\d+)?[bm]")


def stand_in(repo_id: str) -> Path | None:
    """Return the bundled spec of the same shape; None if the name does not say that there is one.

    Any other additional word (a length, a quantization, a version) may change the shape.
    """
    known = _names()
    return next((known[name] for name in _readings(repo_id) if name in known), None)


def _readings(repo_id: str) -> Iterator[str]:
    """Yield the readings of a repository's name: as it is, as the pretrained model, and as a tuned variant of it."""
    name = _own_name(repo_id)
    yield name
    yield _plain(name)
    untuned = _without(name, _TUNED)
    yield untuned
    yield _plain(untuned)


def _names() -> Mapping[str, Path]:
    """Return the names of bundled models, on the Hub and here, with their spec files."""
    out: dict[str, Path] = {}
    for path in sorted(specs_folder().glob("*.json")):
        spec: dict[str, Any] = read_bundled(path)
        on_hub = [_own_name(alias) for alias in spec["aliases"] if "/" in alias]
        for name in (*on_hub, *map(_plain, on_hub)):
            out[name] = path
    return out


def _own_name(repo_id: str) -> str:
    return repo_id.rpartition("/")[2].lower()


def _plain(name: str) -> str:
    return _without(name, _PLAIN) if any(_SIZE.fullmatch(word) for word in name.split("-")) else name


def _without(name: str, words: tuple[str, ...]) -> str:
    return "-".join(word for word in name.split("-") if word not in words)
