# pyright: basic
"""The run of a setup as it is trained, and what transformers does around flash-attn's kernels besides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memcalc.estimation.estimate import estimate
from memcalc.validate import as_trained

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup
    from memcalc.validate.comparison import Comparison


def validate(model: Any, *, backend: str = "fake", **options: Any) -> Comparison:
    """Estimate a setup, run it as it is trained, and put both side by side. Raises InputError as memcalc.validate.run does."""
    with with_flash(estimate(model, **options).setup, backend):
        return as_trained.validate(model, backend=backend, **options)


@contextlib.contextmanager
def with_flash(setup: Setup, backend: str) -> Iterator[None]:
    """Let a run within a block take padding out of a padded batch, without data."""
    if not (setup.padded and setup.has_flash_attn and backend == "fake"):
        yield
        return
    try:
        from memcalc.validate.unpadded import padding_taken_out
    except ImportError:  # the run says which package is missing
        yield
        return
    with padding_taken_out():
        yield
