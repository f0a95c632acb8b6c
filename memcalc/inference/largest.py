"""The largest batch that a GPU has room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.inference.report import Inferred

MOST = 10**7


def largest_batch(inferred: Inferred) -> int:
    """Return the largest batch whose run fits, by bisection; 0 if not even one sequence fits.

    A run's sizes are polynomials in the batch. A batch of one takes branches of its own, so it is run by itself, and one run
    of two sequences stands for all larger batches. Where they are none, each batch is run.
    """
    gpu = inferred.gpu
    assert gpu is not None
    many = _of(inferred, 2)

    def needs(batch: int) -> int:
        return many.needs(batch) if inferred.run.program.polynomial_in_batch else _rerun(inferred, batch).needs()

    if needs(2) > gpu.capacity:
        return int(_of(inferred, 1).needs(1) <= gpu.capacity)
    low, high = 2, 4
    while high < MOST and needs(high) <= gpu.capacity:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needs(middle) <= gpu.capacity else (low, middle)
    return low


def _of(inferred: Inferred, batch: int) -> Inferred:
    """Return the run of another batch; the same one if it takes the same branches."""
    return inferred if (inferred.asked.batch_size > 1) == (batch > 1) else _rerun(inferred, batch)


def _rerun(inferred: Inferred, batch: int) -> Inferred:
    """Run another batch."""
    from dataclasses import replace

    from memcalc.inference.infer import ran

    asked = inferred.asked._replace(batch_size=batch)
    return replace(inferred, asked=asked, run=ran(inferred.model, asked))
