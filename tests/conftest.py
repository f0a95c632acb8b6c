"""What every test begins with."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

# Installed for its Python alone (transformer_engine_oracle.py): importing it would fail, with an error that Megatron-Core
# does not expect, for lack of its compiled parts.
modules: dict[str, Any] = sys.modules  # type: ignore[assignment]
modules["transformer_engine"] = None


@pytest.fixture(autouse=True)
def little_garbage() -> None:
    """Oracles collect garbage several times a run; without this most of it would go into walking what torch has imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is as wide as it is by itself, whatever the shell or a worker of the test runner has set."""
    monkeypatch.delenv("COLUMNS", raising=False)
