"""Kahneman-Tversky optimization as TRL's KTOTrainer runs it (trl/trainer/kto_trainer.py, `_compute_loss`), with its own loss.

Each sequence has a label, and comes a second time with another prompt's completion: that batch estimates how far the policy
is from its reference (`KL_`). The policy runs over it without a graph, then over the sequences themselves; so does the
reference. All sequences are taken to be desirable: any other mix of labels allocates as much in the head and the layers. The
metrics are left out, as in DPO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.dims import ONE_DIM
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.axes import narrow
from memcalc.core.ops.elementwise import like, one_minus, scale, sigmoid, sub
from memcalc.core.ops.masked import masked_labels
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import Input
from memcalc.tasks.losses import mean_without_nan, of_sequences, sum_of_positions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memcalc.core.dims import Dim
    from memcalc.tasks.program import Models

_NAMES = ("input_ids", "completion_mask", "KL_input_ids", "KL_completion_mask", "KL_attention_mask")


class Kto(NamedTuple):
    """KTO's batch and loss."""

    precomputed: bool
    """True if the reference's log-probabilities come with the batch."""
    padded: bool
    """True if the caller holds a mask of padding already."""

    @property
    def per_example(self) -> int:
        return 1

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
        return batch

    def inputs(self, batch: Dim, seq: Dim) -> Sequence[Input]:
        names = _NAMES if self.padded else (*_NAMES, "attention_mask")
        given = [Input(name, (batch, seq), int64) for name in names]
        given.append(Input("label", (batch,), boolean))
        if self.precomputed:
            given += [Input(name, (batch,), fp32) for name in ("ref_logps", "ref_KL_logps")]
        return given

    def loss(self, models: Models, *batch: Tensor) -> Tensor:
        ids, completion_mask, kl_ids, kl_mask, *rest = batch
        _num_chosen = new_tensor(ids.memory, (), int64, "number of desirable sequences")
        _num_rejected = like(_num_chosen, "number of undesirable sequences")
        kl_logps = _kl_logps(lambda labels: models.policy(kl_ids, labels, graph=False)[0], kl_ids, kl_mask)
        labels = masked_labels(ids, completion_mask)
        outputs = models.policy(ids, labels)
        completion_logps = sum_of_positions(narrow(outputs[0], 1, outputs[0].shape[1]))
        chosen_idx = new_tensor(ids.memory, (ids.shape[0], ONE_DIM), int64, "places of desirable sequences")
        chosen_logps = of_sequences(completion_logps, chosen_idx)
        if self.precomputed:
            ref_logps, ref_kl_logps = rest[-2:]
        else:
            ref_kl_logps = _kl_logps(lambda labels: models.reference(kl_ids, labels), kl_ids, kl_mask)
            ref_outputs = models.reference(ids, labels)
            ref_logps = sum_of_positions(ref_outputs)
        ref_chosen_logps = of_sequences(ref_logps, chosen_idx)
        kl = _mean_of_difference(kl_logps, ref_kl_logps)
        chosen_logratios = sub(chosen_logps, ref_chosen_logps)
        scaled = scale(sub(chosen_logratios, kl), "mul", "beta · ratio")
        chosen_losses = one_minus(sigmoid(scaled))
        del scaled
        _chosen_rewards = like(chosen_logratios, "rewards")
        losses = _joined(scale(chosen_losses, "mul", "weighted losses"))
        return mean_without_nan(losses)


def _kl_logps(model: Callable[[Tensor], Tensor], ids: Tensor, mask: Tensor) -> Tensor:
    """Run `_compute_kl_logps`, without a graph."""
    labels = masked_labels(ids, mask)
    return sum_of_positions(model(labels))


def _mean_of_difference(policy: Tensor, reference: Tensor) -> Tensor:
    """Compute `(policy - reference).mean().detach().mean().clamp(min=0)`, without a graph."""
    mean = new_tensor(policy.memory, (), fp32, "mean of the difference")
    return like(like(mean, "mean of all ranks"), "kl")


def _joined(losses: Tensor) -> Tensor:
    """Compute the `torch.cat` of the losses of desirable sequences and of none."""
    from memcalc.core.ops.shape import cat

    return cat((losses,), losses.shape[0])
