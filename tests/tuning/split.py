"""A step of a rank whose layers are split, with frozen weights or adapters: `memcalc validate`'s."""

from __future__ import annotations

from typing import Any

from memcalc.validate import run
from memcalc.validate.comparison import Comparison


def validate(model: Any, **options: Any) -> Comparison:
    return run.validate(model, engine="fsdp2", **options)
