"""`memcalc validate --backend fake` with Liger-Kernel's own Python and torch's own loop over chunks of the loss, on record."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from records import on_record

import memcalc
from memcalc.validate import fake, run
from memcalc.validate.comparison import Comparison, Measured

_measure = fake.measure


@on_record
def measure(report: memcalc.Report) -> Measured:
    """Versions are not part of a record."""
    return _measure(report)._replace(environment={})


def validate(model: Any, **options: Any) -> Comparison:
    with patch.object(fake, "measure", measure):
        return run.validate(model, **options)
