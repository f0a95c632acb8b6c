"""transformers' and TRL's step over packed rows: `memcalc validate`'s. TRL is imported where its packages for data sets are
not installed, too."""

from __future__ import annotations

from typing import Any

from tasks.trl_oracle import import_trl

from memcalc.validate import run
from memcalc.validate.comparison import Comparison


def validate(model: Any, **options: Any) -> Comparison:
    import_trl()
    return run.validate(model, packing=True, **options)
