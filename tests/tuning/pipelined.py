"""A pipeline rank's step with frozen weights or adapters: `memcalc validate`'s, whose stages know which hidden states want a
gradient."""

from __future__ import annotations

from tuning.split import validate

__all__ = ["validate"]
