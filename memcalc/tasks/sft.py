"""Supervised fine-tuning as TRL's SFTTrainer runs it (trl/trainer/sft_trainer.py, `compute_loss`), with its loss `nll`.

The head is that of the preference tasks: no logits. All positions but the first have a label. transformers' Trainer counts the
labels of all micro-batches of a step before the first one (`num_items_in_batch`), and scales the loss by the number of ranks
(`average_tokens_across_devices`). The metrics are left out, as in DPO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.dtypes import int64
from memcalc.core.ops.elementwise import like, neg, over, scale
from memcalc.core.ops.routing import sum_all
from memcalc.families.base.module import Input

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.dims import Dim
    from memcalc.core.tensor import Tensor
    from memcalc.tasks.program import Models


class Sft(NamedTuple):
    """SFT's batch and loss."""

    padded: bool
    """True if the caller holds a mask of padding already, or rows are packed and have none."""

    @property
    def per_example(self) -> int:
        return 1

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("entropy", "is_top1")

    @property
    def disables_dropout(self) -> bool:
        return False

    @property
    def scored(self) -> int | None:
        return None

    def sequences(self, batch: Dim) -> Dim:
        return batch

    def inputs(self, batch: Dim, seq: Dim) -> Sequence[Input]:
        names = ("input_ids", "labels", "attention_mask")
        given = [Input(name, (batch, seq), int64) for name in (names[:2] if self.padded else names)]
        return [*given, Input("num_items_in_batch", (), int64)]

    def loss(self, models: Models, ids: Tensor, labels: Tensor, *rest: Tensor) -> Tensor:
        num_items_in_batch = rest[-1]
        outputs = models.policy(ids, labels)
        per_token_loss = neg(outputs[0])
        num_tokens = like(num_items_in_batch, "number of labels, at least 1")
        loss = over(sum_all(per_token_loss), num_tokens)
        return scale(loss, "mul", "loss of a rank")
