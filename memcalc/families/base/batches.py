"""The ways in which a model is given less, or other rows, than the micro-batch: shared sequences and packed rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.dims import Dim
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Input, Run


class SharedSequences(Protocol):
    """The sharing of sequences: how a rank is given its tokens, and how it computes its loss."""

    def length_on_rank(self, shard: Dim) -> Dim:
        """Return the rank's tokens of a sequence, if a run's sizes are polynomials in `shard`."""
        ...

    def inputs(self, batch: Dim, own: Dim) -> Sequence[Input]:
        """Return the batch of a rank that has `own` tokens of each sequence."""
        ...

    @property
    def ranks(self) -> int: ...

    def give(self, run: Run) -> Tensor:
        """Allocate the batch and return the ids. The run gets its positions and labels."""
        ...

    def loss(self, run: Run, loss: Tensor) -> Tensor:
        """Return the loss that backward begins with, from the rank's own loss."""
        ...


class PackedRows(Protocol):
    """The packing of several sequences into rows: what the model sees of a micro-batch, and what the collator gives with it."""

    def rows(self, batch: Dim, seq: Dim) -> tuple[Dim, Dim]:
        """Return the batch and the sequence length that the model sees."""
        ...

    def inputs(self, tokens: Dim) -> Sequence[Input]:
        """Return what the collator gives besides tokens and labels, of a row of `tokens` tokens."""
        ...

    def labelled(self, tokens: Dim) -> Dim:
        """Return the tokens of a row that have a label."""
        ...

    def give(self, run: Run) -> list[Tensor]:
        """Allocate what the collator gives besides tokens and labels. The run gets its positions."""
        ...
