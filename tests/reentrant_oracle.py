"""Setups with reentrant checkpoints, beside what `memcalc validate` measures: its own runs, with transformers' checkpoints switched
to `use_reentrant=True`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch.nn.functional as F

from memcalc.validate import fake, reference, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from memcalc.validate.comparison import Comparison


def _switch(model: Any, policy: object) -> None:
    assert policy is None
    model.gradient_checkpointing_enable({"use_reentrant": True})


@contextlib.contextmanager
def reentrant() -> Iterator[None]:
    """transformers' switch as validate turns it, with reentry."""
    with patch.object(reference, "recompute", _switch):
        yield


def validated(model: Any, **options: Any) -> Comparison:
    """The estimate of a setup and its real run, side by side."""
    with reentrant(), patch.object(fake, "measure", fake.measure):
        return run.validate(model, recompute="full", reentrant_checkpoints=True, backend="fake", **options)
