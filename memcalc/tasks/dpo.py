"""Direct preference optimization as TRL's DPOTrainer runs it (trl/trainer/dpo_trainer.py, `_compute_loss`), with its sigmoid
loss.

The chosen and the rejected sequences of a micro-batch are one batch. The policy runs first, then the reference without a
graph, while all that the policy has saved is alive. The metrics are left out: what they allocate is less than what the head
has allocated before them, and is freed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.dims import Dim, divided
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.axes import chunk_dim, narrow
from memcalc.core.ops.elementwise import neg, scale, sub
from memcalc.core.ops.masked import masked_labels
from memcalc.families.base.module import Input
from memcalc.tasks.losses import log_sigmoid, mean_all, sum_of_positions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.tensor import Tensor
    from memcalc.tasks.program import Models


class Dpo(NamedTuple):
    """DPO's batch and loss."""

    precomputed: bool
    """True if the reference's log-probabilities come with the batch."""
    padded: bool
    """True if the caller holds a mask of padding already."""

    @property
    def per_example(self) -> int:
        return 2

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("entropy", "mean_logits", "is_top1")

    @property
    def disables_dropout(self) -> bool:
        return True

    @property
    def scored(self) -> int | None:
        return None

    def sequences(self, batch: Dim) -> Dim:
        return Dim("2·batch", 2 * batch.size, tuple(2 * c for c in batch.poly))  # type: ignore[arg-type]

    def inputs(self, batch: Dim, seq: Dim) -> Sequence[Input]:
        names = ("input_ids (chosen, then rejected)", "completion_mask", "attention_mask")
        given = [Input(name, (batch, seq), int64) for name in (names[:2] if self.padded else names)]
        if self.precomputed:
            given += [Input(name, (divided(batch, 2),), fp32) for name in ("ref_chosen_logps", "ref_rejected_logps")]
        return given

    def loss(self, models: Models, ids: Tensor, completion_mask: Tensor, *rest: Tensor) -> Tensor:
        labels = masked_labels(ids, completion_mask)
        outputs = models.policy(ids, labels)
        per_token_logps = narrow(outputs[0], 1, outputs[0].shape[1])
        logps = sum_of_positions(per_token_logps)
        chosen_logps, rejected_logps = chunk_dim(logps, 0, 2)
        if self.precomputed:
            ref_chosen_logps, ref_rejected_logps = rest[-2:]
        else:
            ref_outputs = models.reference(ids, labels)
            ref_logps = sum_of_positions(ref_outputs)
            ref_chosen_logps, ref_rejected_logps = chunk_dim(ref_logps, 0, 2)
        chosen_logratios = sub(chosen_logps, ref_chosen_logps)
        rejected_logratios = sub(rejected_logps, ref_rejected_logps)
        delta_score = sub(chosen_logratios, rejected_logratios)
        per_sequence_loss = neg(log_sigmoid(scale(delta_score, "mul", "beta · delta")))
        return scale(scale(mean_all(per_sequence_loss), "mul", "loss"), "add", "loss")
