"""Figures that recorded runs have measured and no rule gives: figures.json, which `docs/generate.py` makes from
tests/measured.

If there is a figure for the GPU of an estimate, `allocated`, `reserved` and `device` use it instead of an assumed one,
as a row with the basis `measured`.
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
    """The GPU's name in `memcalc gpus`."""
    ranks: int
    """The number of real ranks: NCCL's bytes need more than one."""
    nbytes: int
    """The median of the cases."""
    source: str
    """GPU, driver and versions, the number of cases, and their range."""


class Fragmentation(NamedTuple):
    """The bytes that the caching allocator holds beyond the allocated ones, for an engine whose allocations are not
    played, or where playing them was farther off."""

    engine: str
    share: float
    """The share of the allocated bytes; the median of the cases."""
    source: str


class Error(NamedTuple):
    """The most by which `device` was too low."""

    engine: str
    percent: int
    """The error in percent, rounded up."""
    source: str


class Figures(NamedTuple):
    """All figures of a file."""

    sizes: tuple[Size, ...] = ()
    fragmentation: tuple[Fragmentation, ...] = ()
    errors: tuple[Error, ...] = ()

    def size(self, name: str, gpu: str, ranks: int = 1) -> Size | None:
        """Return the size of a name on a GPU; None if there is none. More than two ranks count as three, as in
        github.com/NVIDIA/nccl issue 964."""
        found = (one for one in self.sizes if (one.name, one.gpu, min(one.ranks, 3)) == (name, gpu, min(ranks, 3)))
        return next(found, None)

    def fragmentation_of(self, engine: str) -> Fragmentation | None:
        return next((one for one in self.fragmentation if one.engine == engine), None)

    def error_of(self, engine: str) -> Error | None:
        return next((one for one in self.errors if one.engine == engine), None)


_INSTEAD: Final[ContextVar[Figures | None]] = ContextVar("figures", default=None)


def figures() -> Figures:
    """Return the figures that ship with memcalc, or those that replace them within `using`."""
    instead = _INSTEAD.get()
    return _bundled() if instead is None else instead


@cache
def _bundled() -> Figures:
    return parsed(read_bundled(FILE))


@contextmanager
def using(instead: Figures) -> Generator[None]:
    """Use other figures for the estimates within a block: figures must not be made from estimates that contain them."""
    token = _INSTEAD.set(instead)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def parsed(document: Mapping[str, Any]) -> Figures:
    """Return the figures in the file's document."""
    return Figures(
        tuple(Size(**one) for one in document["sizes"]),
        tuple(Fragmentation(**one) for one in document["fragmentation"]),
        tuple(Error(**one) for one in document["errors"]),
    )


def document_of(made: Figures) -> dict[str, Any]:
    """Return the file's document of figures."""
    return {"schema_version": 1, **{part: [one._asdict() for one in ones] for part, ones in made._asdict().items()}}
