"""What every test of a file format begins with."""

from __future__ import annotations

import os

import pytest

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher has started this process, whatever tests before have told it: trainers ask the environment."""
    for name in list(os.environ):
        if name in LAUNCHED or name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")):
            monkeypatch.delenv(name)
