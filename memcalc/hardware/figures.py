"""What recorded runs have measured that no rule gives: figures.json, which `docs/generate.py` makes of tests/measured.

Where there is a figure for the GPU of an estimate, `allocated`, `reserved` and `device` have it in place of an assumed one, as
a row with the basis `measured`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from memcalc.inputs.files import read_bundled

FILE: Final = Path(__file__).with_name("figures.json")
CONTEXT: Final = "CUDA context"
WORKSPACES: Final = "cuBLAS workspaces"
NCCL: Final = "NCCL communicator"


class Size(NamedTuple):
    """Bytes that one GPU held."""

    name: str
    gpu: str
    """As `memcalc gpus` has it."""
    ranks: int
    """Real ones: NCCL's are there with more than one."""
    nbytes: int
    """The median of the cases."""
    source: str
    """GPU, driver and versions, how many cases, and from what to what."""


class Fragmentation(NamedTuple):
    """This is what the caching allocator holds beyond what is allocated, of an engine whose allocations are not played, or where
    that was farther off."""

    engine: str
    share: float
    """Of what is allocated; the median of the cases."""
    source: str


class Error(NamedTuple):
    """By how much `device` was too low at most."""

    engine: str
    percent: int
    """Rounded up."""
    source: str


class Figures(NamedTuple):
    """All of a file."""

    sizes: tuple[Size, ...] = ()
    fragmentation: tuple[Fragmentation, ...] = ()
    errors: tuple[Error, ...] = ()

    def size(self, name: str, gpu: str, ranks: int = 1) -> Size | None:
        """One of more than two ranks stands for all such, as in github.com/NVIDIA/nccl issue 964."""
        found = (one for one in self.sizes if (one.name, one.gpu, min(one.ranks, 3)) == (name, gpu, min(ranks, 3)))
        return next(found, None)

    def fragmentation_of(self, engine: str) -> Fragmentation | None:
        return next((one for one in self.fragmentation if one.engine == engine), None)

    def error_of(self, engine: str) -> Error | None:
        return next((one for one in self.errors if one.engine == engine), None)


_INSTEAD: Final[ContextVar[Figures | None]] = ContextVar("figures", default=None)


def figures() -> Figures:
    """Return those that ship with memcalc, or those that are used instead."""
    instead = _INSTEAD.get()
    return _bundled() if instead is None else instead


@cache
def _bundled() -> Figures:
    return parsed(read_bundled(FILE))


@contextmanager
def using(instead: Figures) -> Generator[None]:
    """Estimates within have these: figures are not made of estimates that have them."""
    token = _INSTEAD.set(instead)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def parsed(document: Mapping[str, Any]) -> Figures:
    """Of the file's document."""
    return Figures(
        tuple(Size(**one) for one in document["sizes"]),
        tuple(Fragmentation(**one) for one in document["fragmentation"]),
        tuple(Error(**one) for one in document["errors"]),
    )


def document_of(made: Figures) -> dict[str, Any]:
    """The file's document."""
    return {"schema_version": 1, **{part: [one._asdict() for one in ones] for part, ones in made._asdict().items()}}
