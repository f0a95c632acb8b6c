"""A step over a base in 4 bits whose codes an engine shards: `memcalc validate`'s, where its packages are installed."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.validate import run
from memcalc.validate.comparison import Comparison


def validate(model: Any, **options: Any) -> Comparison:
    for name in ("bitsandbytes", "peft", *(["deepspeed"] if options["engine"] == "deepspeed" else [])):
        pytest.importorskip(name)
    return run.validate(model, **options)
