"""TRL's OffloadActivations around a step of transformers' model: `memcalc validate`'s step, and what is copied."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from tasks.trl_oracle import import_trl

from memcalc.validate import activations, run
from memcalc.validate.activations import Copy
from memcalc.validate.comparison import Comparison

_moved_to_the_host = activations.moved_to_the_host


def validate(model: Any, **options: Any) -> tuple[Comparison, list[Copy]]:
    """Return the comparison, and what the last micro-batch has copied."""
    import_trl()
    found: list[list[Copy]] = []

    @contextlib.contextmanager
    def noted() -> Iterator[list[Copy]]:
        with _moved_to_the_host() as copies:
            found.append(copies)
            yield copies

    with patch.object(activations, "moved_to_the_host", noted):
        return run.validate(model, offload_activations="cpu", **options), found[-1]
