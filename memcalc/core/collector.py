"""A switch for Python's cyclic garbage collector, which scans all objects again and again while a run makes tens of
thousands of them."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def without_collections() -> Generator[None]:
    """Run a block, or as a decorator a function, without the collector. No tensor is in a cycle, so every dead tensor
    is still freed."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
