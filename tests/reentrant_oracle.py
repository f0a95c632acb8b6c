"""Setups with reentrant checkpoints beside what `memcalc validate` measures of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.validate import as_trained
from memcalc.validate.as_trained import kernels_without_a_graph

if TYPE_CHECKING:
    from memcalc.validate.comparison import Comparison

__all__ = ["kernels_without_a_graph", "validated"]


def validated(model: Any, **options: Any) -> Comparison:
    """The estimate of a setup and its real run, side by side."""
    return as_trained.validate(model, backend="fake", **{"recompute": "full", "reentrant_checkpoints": True} | options)
