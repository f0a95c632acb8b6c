"""What every test begins with."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def little_garbage() -> None:
    """Oracles collect garbage several times a run; without this most of it would go into walking what torch has imported."""
    gc.collect()
    gc.freeze()
