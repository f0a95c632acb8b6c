"""Registries: the objects in a package's modules, found by file name and imported when they are asked for.

A package's `__path__` lists the folders of its modules. A folder that is appended to `__path__` adds its files to the
registry; nothing else has to be registered.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Maps names to the objects in their modules. `-` in a name is `_` in the file name."""

    def __init__(
        self,
        package: str,
        known: tuple[str, ...],
        read: Callable[[str, Any], tuple[str, T] | None],
        *,
        inside: str | None = None,
        helpers: tuple[str, ...] = (),
        unlisted: tuple[str, ...] = (),
    ) -> None:
        self.package = package
        self.known = dict.fromkeys(known)
        """The names that are listed first, in this order. Other names follow, sorted."""
        self.read = read
        """Called with a file name and its module. Returns the object's name and the object; None if the module has
        none."""
        self.inside = inside
        """The module to read if a name has a package to itself."""
        self.helpers = ("base", *helpers)
        """Modules without an object; listing does not import them."""
        self.unlisted = frozenset(map(_stem, unlisted))
        """File names of objects that are found by name and not listed."""
        self.found: dict[str, T] = {}
        """The objects that have been asked for, by name."""
        self._listed: dict[tuple[str, ...], tuple[str, ...]] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self.found:
            found = self._imported(_stem(name), known=name in self.known)
            if found is None or found[0] != name:
                raise KeyError(name)
            self.found[name] = found[1]
        return self.found[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self.known or self.get(name) is not None)

    def __iter__(self) -> Iterator[str]:
        yield from self.known
        yield from self._others()

    def __len__(self) -> int:
        return len(self.known) + len(self._others())

    def _imported(self, stem: str, *, known: bool = False) -> tuple[str, T] | None:
        """Return the name and the object in the module of this file name; None if there is none. A known name is
        imported without looking for the file."""
        module = f"{self.package}.{stem}"
        if not known and (not stem.isidentifier() or stem.startswith("_") or stem in self.helpers):
            return None
        if not known and not _is_there(module):
            return None
        loaded = import_module(module)
        if self.inside is not None and hasattr(loaded, "__path__"):
            loaded = import_module(f"{module}.{self.inside}")
        return self.read(stem, loaded)

    def _others(self) -> tuple[str, ...]:
        """Return the names that are not known beforehand."""
        folders = tuple(import_module(self.package).__path__)
        if folders not in self._listed:
            files = (path for folder in map(Path, folders) if folder.is_dir() for path in folder.iterdir())
            stems = {path.stem for path in files if path.suffix in (".py", "")}
            found = map(self._imported, sorted(stems - {_stem(name) for name in self.known} - self.unlisted))
            self._listed[folders] = tuple(one[0] for one in found if one is not None)
        return self._listed[folders]


def _is_there(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _stem(name: str) -> str:
    return name.replace("-", "_")


def constant(name: str, attribute: str, stem: str, module: Any) -> tuple[str, Any] | None:
    """Return the object `name` of a module with its own name, which the object has as `attribute`; None if there is no
    such object."""
    held = getattr(module, name, None)
    return None if held is None else (getattr(held, attribute), held)


def _engine(stem: str, module: Any) -> tuple[str, Any] | None:
    """Return the name and the module of an engine. A module is an engine if it has the function `holdings`."""
    return (stem.replace("_", "-"), module) if hasattr(module, "holdings") else None


class InTurn(ChainMap[str, Any]):
    """Registries one after the other: names are looked for and listed in the order of the registries."""

    def __init__(self, *registries: Registry[Any]) -> None:
        super().__init__(*registries)  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> Any:
        for registry in self.maps:
            if name in registry.found:  # type: ignore[attr-defined]
                return registry.found[name]  # type: ignore[attr-defined]
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        for registry in self.maps:
            yield from registry


OPTIMIZERS: Final[Registry[Any]] = Registry(
    "memcalc.optimizers",
    (
        "adamw",
        "adam",
        "sgd",
        "sgd-momentum",
        "adafactor",
        "lion",
        "adamw-8bit",
        "muon",
        "adam-8bit",
        "lion-8bit",
        "paged-adamw",
        "paged-adamw-8bit",
        "paged-adam",
        "paged-adam-8bit",
        "paged-lion",
        "paged-lion-8bit",
        "apollo-adamw",
        "galore-adamw",
        "adam-mini",
        "lomo",
        "adalomo",
    ),
    partial(constant, "OPTIMIZER", "name"),
    helpers=("bitsandbytes", "low_rank", "of_deepspeed"),
)
OF_DEEPSPEED: Final[Registry[Any]] = Registry(
    "memcalc.optimizers.of_deepspeed",
    ("lamb", "onebit-adam", "onebit-lamb", "zero-one-adam"),
    partial(constant, "OPTIMIZER", "name"),
    helpers=("compressed_allreduce", "one_bit"),
)
"""The optimizers that run in DeepSpeed's engine alone."""
EVERY_OPTIMIZER: Final = InTurn(OPTIMIZERS, OF_DEEPSPEED)
"""All optimizers; those that run in every engine come first."""
ENGINES: Final[Registry[Any]] = Registry(
    "memcalc.engines",
    ("none", "ddp", "fsdp2", "deepspeed", "megatron", "fsdp1", "data-parallel", "parameter-server", "colossalai"),
    _engine,
    inside="engine",
    helpers=(
        "branches",
        "common_statistics",
        "fused_backward",
        "host",
        "parts",
        "pipeline_ranks",
        "rank",
        "ranks",
        "runs",
        "shared_sequences",
        "transfers",
    ),
)
