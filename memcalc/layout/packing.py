"""Packed rows: several sequences one after the other in a row of `--seq-len` tokens, and all rows of a micro-batch as one.

As TRL's collator makes them with `padding_free`, which packing with its strategy `bfd` switches on (trl/trainer/sft_trainer.py,
DataCollatorForLanguageModeling): one row of all tokens, their positions, which begin anew with each sequence, where the
sequences begin (`cu_seq_lens_q` and `cu_seq_lens_k`, two tensors once they are on the GPU), and the number of each token's
sequence (`seq_idx`). There is no mask.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import ONE_DIM, Dim, merge, plus
from memcalc.core.dtypes import int32, int64
from memcalc.families.base.module import Input

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Run

SOURCE: Final = "TRL 1.16 trl/trainer/sft_trainer.py, DataCollatorForLanguageModeling"


class Packing(NamedTuple):
    """The packing of a micro-batch, each row of which is one sequence of the whole length, or several."""

    of_each: int = 1
    """The sequences of a row, rounded up."""
    attended: int | None = None
    """The tokens of the sequence that a token is in, in the mean over tokens; None: all of its row."""

    def rows(self, batch: Dim, seq: Dim) -> tuple[Dim, Dim]:
        """Return the batch and the sequence length that the model sees: one row of all tokens."""
        return ONE_DIM, merge(batch, seq)

    def inputs(self, tokens: Dim) -> tuple[Input, ...]:
        """Return what the collator gives besides tokens and labels, of a row of `tokens` tokens."""
        ends = plus(documents(tokens, self.of_each), 1)
        return (
            Input("position_ids", (ONE_DIM, tokens), int64),
            Input("cu_seq_lens_q", (ends,), int32),
            Input("cu_seq_lens_k", (ends,), int32),
            Input("seq_idx", (ONE_DIM, tokens), int32),
        )

    def labelled(self, tokens: Dim) -> Dim:
        """Return the tokens that have a label: all but the first of each sequence."""
        count = documents(tokens, self.of_each)
        poly = tuple(a - b for a, b in zip(tokens.poly, count.poly, strict=True))
        return Dim(f"({tokens.name}-{count.name})", tokens.size - count.size, poly)  # type: ignore[arg-type]

    def give(self, run: Run) -> list[Tensor]:
        """Allocate what the collator gives besides tokens and labels. The run gets its positions."""
        given = [run.add_input(one) for one in self.inputs(run.seq)]
        run.positions = given[0]
        return given


@lru_cache(maxsize=1024)
def documents(tokens: Dim, of_each: int) -> Dim:
    """Return the dim that counts the packed sequences, if each row of `tokens` has `of_each` of them."""
    batch = tokens.parts[0]
    return Dim("sequences", of_each * batch.size, tuple(of_each * c for c in batch.poly))  # type: ignore[arg-type]
