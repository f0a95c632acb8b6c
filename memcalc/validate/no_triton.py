# pyright: basic
"""A stand-in for Triton whose kernels do nothing: the Python around a kernel allocates what it allocates on a GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

NAME: Final = "triton"
_DTYPES: Final = ("float32", "float16", "bfloat16")


class _Kernel:
    """A kernel that is launched over a grid, and does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class _Name(ModuleType):
    """A module of Triton's language. Its names are only looked at while kernels are defined."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


class _Constant:
    """A number that kernels are compiled for. Python reads its value."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _defined(function: Any = None, **options: Any) -> Any:
    """Decorate a kernel, with or without options."""
    return _Kernel() if function is not None else lambda function: _Kernel()


def _as_it_is(*args: Any, **options: Any) -> Any:
    return lambda function: function


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == NAME else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Name(spec.name)

    def exec_module(self, module: Any) -> None:
        if module.__name__ == NAME:
            module.__version__ = "3.7.0"
            module.jit, module.heuristics, module.autotune = _defined, _as_it_is, _as_it_is
            module.cdiv, module.next_power_of_2 = lambda a, b: -(-a // b), _next_power_of_2
        elif module.__name__ == f"{NAME}.language":
            module.constexpr = _Constant
            for dtype in _DTYPES:
                setattr(module, dtype, dtype)


@contextlib.contextmanager
def no_triton() -> Iterator[None]:
    """Import this stand-in as `triton` within a block, whether there is a real one or not."""
    with set_aside(NAME):
        finder = _Finder()
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


@contextlib.contextmanager
def set_aside(package: str) -> Iterator[None]:
    """Forget the modules of a package within a block; after it, have those again that were there before it."""
    before = {name: sys.modules.pop(name) for name in modules_of(package)}
    try:
        yield
    finally:
        for name in modules_of(package):
            del sys.modules[name]
        sys.modules.update(before)


def modules_of(package: str) -> dict[str, ModuleType]:
    """Return the modules of a package that are imported."""
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
