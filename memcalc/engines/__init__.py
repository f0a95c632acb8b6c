"""Engines: what each holds besides the activations, and what it sends. A literal map, imported on demand."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from memcalc.engines.base.holdings import Holdings
    from memcalc.inputs.model import Model
    from memcalc.layout.collectives import Collective
    from memcalc.setup.setup import Setup

ENGINES: Final[dict[str, str]] = {
    "none": "memcalc.engines.plain",
    "ddp": "memcalc.engines.ddp",
    "deepspeed": "memcalc.engines.deepspeed.engine",
    "fsdp2": "memcalc.engines.fsdp2.engine",
    "megatron": "memcalc.engines.megatron.engine",
}


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
    return import_module(ENGINES[name])  # type: ignore[return-value]
