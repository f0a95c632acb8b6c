"""What every test begins with."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from records import examples

pytest_plugins = ("record_plugin",)

# Installed for its Python alone (transformer_engine_oracle.py): importing it would fail, with an error that Megatron-Core
# does not expect, for lack of its compiled parts.
modules: dict[str, Any] = sys.modules  # type: ignore[assignment]
modules["transformer_engine"] = None


# One thread of torch's a process: there is a worker for each core, the tensors are small, and threads that wait for each other
# wait in a loop. Two of them a worker take four times as long on a machine with two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """A busy machine is no failure of a test; and a default run has fewer examples than Hypothesis' own hundred."""
    slow: Any = [HealthCheck.too_slow]
    settings.register_profile("here", deadline=None, suppress_health_check=slow, max_examples=examples(100))
    settings.load_profile("here")


_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h

# Blocks of a MiB and more are mappings of their own, which go when they are freed. glibc would raise that to 32 MiB by itself,
# and a heap that held a whole model once stays as large: one mapping of more than the machine's memory cannot be forked.
with contextlib.suppress(AttributeError, OSError):
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**20)


# No report is in a cycle, and of objects that stay each collection scans all that are new: with Python's own thresholds that is
# a fifth of a run's time.
gc.set_threshold(100_000, 20, 100)

_MANY_OBJECTS = 20_000


@pytest.fixture(autouse=True)
def little_garbage() -> None:
    """Oracles collect garbage several times a run; without this most of it would go into walking what torch has imported, and
    what tests before have left: what an oracle's own collection leaves is old, and no longer counted among the new. Where these
    have left little it is not worth the milliseconds, of which there are 20,000."""
    young, older, _ = gc.get_count()
    if older or young > _MANY_OBJECTS or len(gc.get_objects(generation=2)) > _MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is as wide as it is by itself, whatever the shell or a worker of the test runner has set."""
    monkeypatch.delenv("COLUMNS", raising=False)
