"""Functions that a run may call another implementation of: what makes kernels a choice.

A kernel pack (`memcalc.kernels`) maps such functions to its own; `memory.kernels` holds the map of one run. Without a pack
it is empty, and every program is transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from memcalc.core.tensor import Memory

Replacements = Mapping[Callable[..., Any], Callable[..., Any]]
"""What stands in for what."""


class InMemory(Protocol):
    """What knows the memory of its run: a tensor, a module, the run itself."""

    @property
    def memory(self) -> Memory: ...


T = TypeVar("T", bound=InMemory)
P = ParamSpec("P")
R = TypeVar("R")


def replaceable(own: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """`own`, or what the run's kernel pack has in its place."""

    @wraps(own)
    def call(first: T, *args: P.args, **kwargs: P.kwargs) -> R:
        return first.memory.kernels.get(call, own)(first, *args, **kwargs)

    return call
