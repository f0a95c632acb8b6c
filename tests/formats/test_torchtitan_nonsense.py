"""Whatever torchtitan's file holds ends as values, or as one line."""

from __future__ import annotations

import random
from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.formats.torchtitan import read
from memcalc.formats.torchtitan_config import _KEYS

VALUES = [
    None, True, False, 0, 1, 2, 3, -1, 10**12, 10**400, 2.0, 1.5, 1e400, float("nan"), "", "2", "8B", "llama3", "op",
    "auto", "${X}", "a\nb", "float8", [], ["layers.2"], [1], [["layers.0"]], {}, {"enable": 1}, {"a": {"b": []}},
]  # fmt: skip


@pytest.mark.parametrize("seed", range(300))
def test_nonsense_is_one_line(seed: int) -> None:
    rng = random.Random(seed)
    content: dict[str, Any] = {}
    for section in rng.sample(sorted(_KEYS), rng.randint(1, 4)):
        place = content
        for part in section.split("."):
            below = place.setdefault(part, {})
            place = below if isinstance(below, dict) else {}
        for key in rng.sample(keys := _KEYS[section].split(), rng.randint(0, len(keys))):
            place[key] = rng.choice(VALUES)
    if rng.random() < 0.2:
        content[rng.choice(["model", "training", "x"])] = rng.choice(VALUES)
    try:
        got = read(rng.choice(["", "run.toml"]), content)
    except InputError as error:
        assert "\n" not in str(error)
        assert str(error).startswith("--torchtitan")
    else:
        assert all("\n" not in note for note in got.notes)


def test_every_key_with_every_value() -> None:
    for section, keys in _KEYS.items():
        for key in keys.split():
            for value in VALUES:
                inner: Any = {key: value}
                for part in reversed(section.split(".")):
                    inner = {part: inner}
                try:
                    got = read("", inner)
                except InputError as error:
                    assert "\n" not in str(error)
                else:
                    assert all("\n" not in note for note in got.notes)
