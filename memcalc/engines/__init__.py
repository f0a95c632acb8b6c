"""Engines: what each holds besides the activations, and what it sends, found by the name that `--engine` takes.

Each is a module with the functions of `Engine`: the one of its name, or `engine` in the package of its name. The modules of
`base`, and those that run engines, are none.
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
    """A module of this package."""

    def holdings(self, model: Model, setup: Setup) -> Holdings:
        """Return what the engine holds on one rank."""
        ...

    def collectives(self, model: Model, setup: Setup) -> list[Collective]:
        """Return what one rank sends in one optimizer step."""
        ...

    def textbook(self, model: Model, setup: Setup) -> list[Collective]:
        """Return what the papers say it sends, where that differs."""
        ...


def load_engine(name: str) -> Engine:
    """The engine of that name (KeyError if there is none)."""
    return ENGINES[name]
