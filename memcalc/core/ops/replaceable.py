"""Functions that a kernel pack can replace.

A kernel pack (`memcalc.kernels`) maps such functions to its own. `memory.kernels` holds the map of one run. Without a
pack the map is empty, and every program is transformers' own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from memcalc.core.tensor import Memory

Replacements = Mapping[Callable[..., Any], Callable[..., Any]]
"""Replaceable functions with the functions that the run calls instead."""


class InMemory(Protocol):
    """An object that knows the memory of its run: a tensor, a module, the run itself."""

    @property
    def memory(self) -> Memory: ...


T = TypeVar("T", bound=InMemory)
P = ParamSpec("P")
R = TypeVar("R")


def replaceable(own: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Return a function that calls the kernel pack's replacement of `own` if the run has one, else `own`."""

    @wraps(own)
    def call(first: T, *args: P.args, **kwargs: P.kwargs) -> R:
        return first.memory.kernels.get(call, own)(first, *args, **kwargs)

    return call
