"""Group relative policy optimization as TRL's GRPOTrainer runs it (trl/trainer/grpo_trainer.py, `_compute_loss`), with its loss
`dapo`.

The completions of several micro-batches are generated together and stay on the GPU (`_buffered_inputs`): a micro-batch is a
view of them. Prompt and completion are joined, and TRL's head scores the tokens of the completion. The metrics are left out, as
in DPO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.axes import cat_dim, narrow
from memcalc.core.ops.elementwise import add, like, mul, neg, over, scale, sub
from memcalc.core.ops.exponential import exp
from memcalc.core.ops.masked import masked_labels
from memcalc.core.ops.routing import sum_all
from memcalc.core.ops.selection import clamp
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import Input
from memcalc.tasks.losses import smaller

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.tasks.program import Models

OLD: Final = "old_per_token_logps"
REFERENCE: Final = "ref_per_token_logps"


class Grpo(NamedTuple):
    """GRPO's batch and loss."""

    completion_len: int
    """The tokens of a completion, the last ones of a sequence."""
    steps_per_generation: int
    """The micro-batches whose completions are generated together."""
    keeps_old: bool
    """True if the log-probabilities of the policy that has generated come with the batch."""
    has_kl: bool
    """True if those of a reference come with it (`beta`)."""

    @property
    def per_example(self) -> int:
        return 1

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("entropy",)

    @property
    def disables_dropout(self) -> bool:
        return False

    @property
    def scored(self) -> int | None:
        return self.completion_len

    def sequences(self, batch: Dim) -> Dim:
        return batch

    def inputs(self, batch: Dim, seq: Dim) -> Sequence[Input]:
        together = times(batch, self.steps_per_generation)
        prompt, completion = lengths(seq, self.completion_len)
        given = [Input(name, (together, prompt), int64) for name in ("prompt_ids", "prompt_mask")]
        given += [Input(name, (together, completion), int64) for name in ("completion_ids", "completion_mask")]
        given += [Input("advantages", (together,), fp32), Input("num_items_in_batch", (), int64)]
        kept = [*([OLD] if self.keeps_old else []), *([REFERENCE] if self.has_kl else [])]
        return [*given, *(Input(name, (together, completion), fp32) for name in kept)]

    def loss(self, models: Models, *batch: Tensor) -> Tensor:
        micro_batch, completion = models.run.batch, batch[2].shape[1]
        num_items_in_batch = batch[5]
        prompt_ids, prompt_mask, completion_ids, mask, advantages, *more = (
            narrow(x, 0, micro_batch) for i, x in enumerate(batch) if i != 5
        )
        input_ids = cat_dim((prompt_ids, completion_ids), 1, models.run.seq)
        attention_mask = cat_dim((prompt_mask, mask), 1, models.run.seq)
        per_token_logps, _entropies = per_token(models, input_ids, attention_mask, completion)
        advantages = Tensor(advantages.storage, (micro_batch, ONE_DIM), (1, 1), advantages.dtype)
        old_per_token_logps = more[0] if self.keeps_old else _detached(per_token_logps)
        log_ratio = sub(per_token_logps, old_per_token_logps)
        coef_1 = exp(log_ratio)
        per_token_kl = _kl(more[-1], per_token_logps, coef_1) if self.has_kl else None
        coef_2 = clamp(coef_1, 2)
        per_token_loss1 = mul(coef_1, advantages)
        per_token_loss2 = mul(coef_2, advantages)
        per_token_loss = neg(smaller(per_token_loss1, per_token_loss2))
        if per_token_kl is not None:
            per_token_loss = add(per_token_loss, scale(per_token_kl, "mul", "beta · kl"))
        normalizer = new_tensor(num_items_in_batch.memory, (), fp32, "number of completions' tokens")
        for _ in range(3):  # of ranks, micro-batches of a step and of a generation
            normalizer = like(normalizer, "number of completions' tokens")
        return over(sum_all(_masked(per_token_loss, mask)), normalizer)


def per_token(models: Models, input_ids: Tensor, attention_mask: Tensor, completion: Dim) -> tuple[Tensor, Tensor]:
    """Run `_get_per_token_logps_and_entropies` of the policy, with its graph. Returns the log-probabilities and entropies of the
    completion's tokens."""
    labels = masked_labels(input_ids, attention_mask)
    outputs = models.policy(input_ids, labels)
    rows = input_ids.shape[0]
    all_logps = narrow(outputs[0], 1, completion)
    all_entropies = narrow(outputs[3], 1, completion)
    logps = _joined(all_logps, rows)
    return logps, _joined(all_entropies, rows)


def lengths(seq: Dim, completion_len: int) -> tuple[Dim, Dim]:
    """Return the tokens of a prompt and of a completion, which are a sequence together."""
    poly = (seq.poly[0] - completion_len, *seq.poly[1:])
    return Dim("prompt", seq.size - completion_len, poly), Dim("completion", completion_len)  # type: ignore[arg-type]


def times(batch: Dim, count: int) -> Dim:
    """Return `count` batches together."""
    if count == 1:
        return batch
    return Dim(f"{count}·{batch.name}", count * batch.size, tuple(count * c for c in batch.poly))  # type: ignore[arg-type]


def _joined(one: Tensor, rows: Dim) -> Tensor:
    """Compute the `torch.cat` of the one chunk: a copy."""
    return cat_dim((one,), 0, rows)


def _detached(a: Tensor) -> Tensor:
    return Tensor(a.storage, a.shape, a.strides, a.dtype)


def _masked(a: Tensor, mask: Tensor) -> Tensor:
    """Compute `a * mask`, whose mask is of integers."""
    return mul(a, mask)


def _kl(ref_per_token_logps: Tensor, per_token_logps: Tensor, coef_1: Tensor) -> Tensor:
    """Compute `(exp(ref - logps) - (ref - logps) - 1) * coef_1` (`use_bias_correction_kl`)."""
    ratio = exp(sub(ref_per_token_logps, per_token_logps))
    per_token_kl = scale(sub(ratio, sub(ref_per_token_logps, per_token_logps)), "sub", "kl")
    del ratio
    return mul(per_token_kl, coef_1)
