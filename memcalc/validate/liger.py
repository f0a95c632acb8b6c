# pyright: basic
"""Liger-Kernel's own Python on tensors without data: `apply_liger_kernel_to_*` patches transformers, kernels of Triton
do nothing, and questions about the device are answered as on a GPU of compute capability 9.0."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from memcalc.errors import InputError
from memcalc.kernels.liger import MULTIPROCESSORS
from memcalc.validate.no_triton import modules_of, no_triton, set_aside

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup

NAME: Final = "liger_kernel"
VERSION: Final = "0.8.5"
_LOSSES: Final = {"fused": "fused_linear_cross_entropy", "liger": "cross_entropy"}
_ANSWERS: Final = {
    '.device.type == "cuda"': '.device.type == "cpu"',
    '.device.type != "cuda"': '.device.type != "cpu"',
    "torch.cuda.get_device_properties(X.device).multi_processor_count": str(MULTIPROCESSORS),
    "torch.cuda.get_device_capability(grad_weight.device)[0]": "9",
    "for mod in self.modules:": 'for mod in (mod for mod in self.modules if mod != "triton"):',
}
"""The answers to what the package's source asks about the device and about Triton."""


class _Source(SourceFileLoader):
    def get_data(self, path: str) -> bytes:
        source = super().get_data(path).decode()
        for question, answer in _ANSWERS.items():
            source = source.replace(question, answer)
        return source.encode()

    def path_stats(self, path: str) -> Any:
        raise OSError("what is compiled here is not the file")  # so that no cached bytecode is read or written


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.split(".")[0] != NAME:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Source(spec.loader.name, spec.loader.path)
        return spec


@cache
def _modules() -> dict[str, ModuleType]:
    """Return a copy of the package that is made of these sources, with kernels that do nothing."""
    for other in ("deepspeed", "peft"):  # are imported if they are there, and must not see the stand-in
        with contextlib.suppress(ImportError):
            importlib.import_module(other)
    with set_aside(NAME), no_triton(), _sources():
        importlib.import_module(f"{NAME}.transformers")
        registry = importlib.import_module(f"{NAME}.backends.registry")
        logging.getLogger(registry.__name__).setLevel(logging.ERROR)  # it warns of each backend that is not installed
        for op in list(registry._DISCOVERY_MAP):
            registry._discover(op)  # otherwise the first call of each op does, within what is measured
        return modules_of(NAME)


@contextlib.contextmanager
def _sources() -> Iterator[None]:
    """Let imports of the package take the sources as they are changed here."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def patched(setup: Setup, model_type: str) -> Iterator[None]:
    """Patch transformers' code of a type within a block, as the setup's kernels and loss say. Raises InputError without
    the package."""
    if not parts_of(setup):
        yield
        return
    _check_version(setup)
    own = _modules()
    with set_aside(NAME), _sources():
        sys.modules.update(own)
        with _applied(setup, model_type):
            yield
        own.update(modules_of(NAME))


@contextlib.contextmanager
def patched_on_gpu(setup: Setup, model_type: str) -> Iterator[None]:
    """Patch transformers' code of a type within a block with the package as it is. Raises InputError without it."""
    if not parts_of(setup):
        yield
        return
    _check_version(setup)
    with _applied(setup, model_type):
        yield


@contextlib.contextmanager
def _applied(setup: Setup, model_type: str) -> Iterator[None]:
    """Call the imported package's `apply_liger_kernel_to_*` for a block."""
    wanted = parts_of(setup)
    apply = getattr(importlib.import_module(f"{NAME}.transformers"), f"apply_liger_kernel_to_{model_type}")
    with _restored(model_type):
        apply(**{part: part in wanted for part in _arguments(apply)})
        yield


def parts_of(setup: Setup) -> tuple[str, ...]:
    """Return the arguments of `apply_liger_kernel_to_*` that are on."""
    loss = [_LOSSES[setup.cross_entropy]] if setup.cross_entropy in _LOSSES else []
    return (*(setup.liger.split(",") if setup.liger else []), *loss)


def _arguments(apply: Any) -> list[str]:
    names = apply.__code__.co_varnames[: apply.__code__.co_argcount]
    return [name for name in names if name != "model"]


def _check_version(setup: Setup) -> None:
    name, value = ("kernels", setup.kernels) if setup.kernels == "fused" else ("cross-entropy", setup.cross_entropy)
    why = f"needs pip install 'memcalc-llm[kernels]' to be run (liger-kernel {VERSION}"
    try:
        found = version("liger-kernel")
    except PackageNotFoundError as error:
        raise InputError(f"--{name} {value}: {why})") from error
    if found != VERSION:
        raise InputError(f"--{name} {value}: {why}; installed: {found})")


@contextlib.contextmanager
def _restored(model_type: str) -> Iterator[None]:
    """Have transformers' names of a type, its models' forward and torch's cross-entropy again after a block."""
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    names, cross_entropy = dict(vars(modeling)), torch.nn.functional.cross_entropy
    forwards = [(own, own.__dict__["forward"]) for own in names.values() if _has_forward(own)]
    try:
        yield
    finally:
        vars(modeling).update(names)
        torch.nn.functional.cross_entropy = cross_entropy
        for own, forward in forwards:
            own.forward = forward


def _has_forward(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module) and "forward" in value.__dict__
