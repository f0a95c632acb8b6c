"""Engines: what each holds besides the activations, and what it sends, found by the name that `--engine` takes.

Each engine is a module with the functions of `Engine`: the module of its name, or `engine` in the package of its name.
The modules of `base`, and those that run engines, are no engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memcalc.registry import ENGINES

if TYPE_CHECKING:
    from memcalc.engines.base.holdings import Holdings
    from memcalc.inputs.model import Model
    from memcalc.layout.collectives import Collective
    from memcalc.setup.setup import Setup

__all__ = ["ENGINES", "Engine", "load_engine"]


class Engine(Protocol):
    """The functions of an engine's module."""

    def holdings(self, model: Model, setup: Setup) -> Holdings:
        """Return what the engine holds on one rank."""
        ...

    def collectives(self, model: Model, setup: Setup) -> list[Collective]:
        """Return what one rank sends in one optimizer step."""
        ...

    def textbook(self, model: Model, setup: Setup) -> list[Collective]:
        """Return what the papers say that one rank sends, if that differs."""
        ...


def load_engine(name: str) -> Engine:
    """Return the engine of that name. Raises KeyError if there is none."""
    return ENGINES[name]
