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
    """Let a run within a block, without data, take padding out of a padded batch, and have flash-attn's version."""
    with contextlib.ExitStack() as stack:
        if backend == "fake":
            with contextlib.suppress(ImportError):  # the run says which package is missing
                if setup.padded and setup.has_flash_attn:
                    from memcalc.validate.unpadded import padding_taken_out

                    stack.enter_context(padding_taken_out())
                if setup.flash_attention_version == 3:
                    from memcalc.validate.flash_3 import third_version

                    stack.enter_context(third_version())
        yield
