"""Registries: what a package's modules hold, each found by its file's name and imported when it is asked for.

A package's `__path__` says in which folders its modules are. A folder that is appended to it adds what its files hold, and
nothing else is told of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Names, and what the module of each holds. `-` in a name is `_` in the file's."""

    def __init__(
        self,
        package: str,
        known: tuple[str, ...],
        read: Callable[[str, Any], tuple[str, T] | None],
        *,
        inside: str | None = None,
        helpers: tuple[str, ...] = (),
    ) -> None:
        self.package = package
        self.known = dict.fromkeys(known)
        """The order in which names are listed; those that are not among them follow, sorted."""
        self.read = read
        """Returns what a module holds and its name, given the file's and the module; None where it holds nothing."""
        self.inside = inside
        """The module to read of a name that has a package to itself."""
        self.helpers = ("base", *helpers)
        """Modules that hold nothing, so that listing does not import them."""
        self.found: dict[str, T] = {}
        """The names that have been asked for, with what their modules hold."""
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
        """Return what the module of that file name holds, and its name. Nothing is looked for where it is known to be."""
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
        """The names that are not known beforehand."""
        folders = tuple(import_module(self.package).__path__)
        if folders not in self._listed:
            files = (path for folder in map(Path, folders) if folder.is_dir() for path in folder.iterdir())
            stems = {path.stem for path in files if path.suffix in (".py", "")}
            found = map(self._imported, sorted(stems - {_stem(name) for name in self.known}))
            self._listed[folders] = tuple(one[0] for one in found if one is not None)
        return self._listed[folders]


def _is_there(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _stem(name: str) -> str:
    return name.replace("-", "_")


def constant(name: str, attribute: str, stem: str, module: Any) -> tuple[str, Any] | None:
    """Return what a module has by the name `name`, which knows its own name as `attribute`."""
    held = getattr(module, name, None)
    return None if held is None else (getattr(held, attribute), held)


def _engine(stem: str, module: Any) -> tuple[str, Any] | None:
    """An engine is a module with its three functions."""
    return (stem.replace("_", "-"), module) if hasattr(module, "holdings") else None


OPTIMIZERS: Final[Registry[Any]] = Registry(
    "memcalc.optimizers",
    ("adamw", "adam", "sgd", "sgd-momentum", "adafactor", "lion", "adamw-8bit", "muon"),
    partial(constant, "OPTIMIZER", "name"),
)
ENGINES: Final[Registry[Any]] = Registry(
    "memcalc.engines",
    ("none", "ddp", "fsdp2", "deepspeed", "megatron"),
    _engine,
    inside="engine",
    helpers=("parts", "ranks", "shared_sequences"),
)
