"""A switch for Python's cyclic garbage collector, which scans all objects again and again while a run makes tens of
thousands of them."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


class _Program:
    """The program that estimates run in, as far as it is known."""

    freezes = False
    """True once it was seen to have frozen objects. They are not counted again: that takes as long as a scan."""


@contextmanager
def without_collections() -> Generator[None]:
    """Run a block, or as a decorator a function, without the collector. No tensor is in a cycle, so every dead tensor
    is still freed.

    What the block has made counts as old afterwards, unless the program freezes objects, which would be unfrozen. As young
    it would all be scanned at once, at the next object that is made: half of a loop's time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            _Program.freezes = _Program.freezes or gc.get_freeze_count() > 0
            if not _Program.freezes:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
