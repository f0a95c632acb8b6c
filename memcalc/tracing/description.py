"""The description of a model before it is run, and the meaning of its modules' paths."""

from __future__ import annotations

import re
from functools import cache
from typing import Final, NamedTuple

from memcalc.core.dims import Dim, Shape
from memcalc.core.dtypes import DType


class Place(NamedTuple):
    """The path of a module or tensor, with `*` for the number of its layer, and that number."""

    name: str
    layer: int | None


class Described(NamedTuple):
    """A parameter or buffer. `dtype` is None if it is the model's."""

    at: Place
    sizes: tuple[int, ...]
    dtype: DType | None


class Description(NamedTuple):
    """A model as built on the meta device."""

    class_name: str
    layers: int
    attention_kinds: tuple[str, ...]
    max_seq_len: int | None
    positions_limit: int | None
    experts_per_token: int | None
    parameters: tuple[Described, ...]
    buffers: tuple[Described, ...]


def place(path: str, stacks: frozenset[str]) -> Place:
    """Return the place of a path. `stacks` are the paths of the lists of layers; lists within a layer keep their
    numbers."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and ".".join(parts[:i]) in stacks:
            return Place(".".join([*parts[:i], "*", *parts[i + 1 :]]), int(part))
    return Place(path, None)


@cache
def shape_of(sizes: tuple[int, ...]) -> Shape:
    """Return dims of these sizes. Only the code that made the sizes knows what they mean."""
    return tuple(Dim(f"dim{i}", size) for i, size in enumerate(sizes))


_COMPONENTS: Final = (
    ("norm", r"(.*\.)?(\w*norm\w*|ln\w*)\.\w+"),
    ("router", r"(.*\.)?(gate|\w*router)\.(\w+)"),
    ("experts", r"(.*\.)?experts\..*"),
    ("attention", r"(.*\.)?\w*(attn|attention)\w*\..*"),
    ("mlp", r"(.*\.)?(\w*(mlp|ffn|feed_forward|shared_expert)\w*|fc\w*|w[123]|ff|\w*dense\w*)\..*"),
    ("embedding", r"(.*\.)?(\w*emb\w*|wte|wpe|shared)\..*"),
    ("head", r"[^*]*(head|cls|predictions|proj|score|output)[^*]*"),
)  # fmt: skip


@cache
def component_of(name: str) -> str:
    """Return the group of a parameter in tables, read from its path: its own module decides first, then those around
    it."""
    lower = name.lower()
    return next((group for group, pattern in _COMPONENTS if re.fullmatch(pattern, lower)), "other")
