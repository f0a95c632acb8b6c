"""The parts of a task: its batch, and the loss that its trainer computes with the policy and, for preferences, the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.dims import Dim
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Input
    from memcalc.tasks.program import Models


class Task(Protocol):
    """A task that one of TRL's trainers runs. Tasks are compared by their values."""

    @property
    def per_example(self) -> int:
        """Return the sequences of a forward for each example of the micro-batch."""
        ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return what the head is asked for beside log-probabilities, of entropy, mean_logits and is_top1."""
        ...

    @property
    def disables_dropout(self) -> bool:
        """Return True if the trainer switches off every nn.Dropout."""
        ...

    @property
    def scored(self) -> int | None:
        """Return the tokens at a sequence's end that alone have labels; None: all but the first one do."""
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
