"""The parts of a task: its batch, and the loss that its trainer computes with the policy and the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.dims import Dim
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Input
    from memcalc.tasks.program import Models


class Task(Protocol):
    """A task of preference tuning. Tasks are compared by their values."""

    @property
    def per_example(self) -> int:
        """Return the sequences of a forward for each example of the micro-batch."""
        ...

    def sequences(self, batch: Dim) -> Dim:
        """Return the sequences of a forward for a micro-batch."""
        ...

    def inputs(self, batch: Dim, seq: Dim) -> Sequence[Input]:
        """Return what the collator gives, for `batch` sequences of a forward."""
        ...

    def loss(self, models: Models, *batch: Tensor) -> Tensor:
        """Run the trainer's `_compute_loss`."""
        ...
