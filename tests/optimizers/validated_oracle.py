"""`memcalc validate --backend fake` with the optimizers of other packages, on record apart from all other measurements."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from records import on_record

import memcalc
from memcalc.validate import fake, run
from memcalc.validate.comparison import Comparison, Measured

_measure = fake.measure


@on_record
def stepped(report: memcalc.Report) -> Measured:
    """Versions are not part of a record."""
    return _measure(report)._replace(environment={})


def validated(model: Any, **options: Any) -> Comparison:
    with patch.object(fake, "measure", stepped):
        return run.validate(dict(model), **options)
