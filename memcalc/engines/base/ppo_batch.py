"""Rows of PPO beside an engine's own: the reward model, the batch that the rollout has left, and what the trainer notes after a
step (trl/experimental/ppo/ppo_trainer.py, `train`)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32, uint8
from memcalc.core.rows import Row
from memcalc.engines.base.holdings import OF_CALLER
from memcalc.families.base.module import after_forward
from memcalc.tasks.ppo import SOURCE
from memcalc.tasks.ppo_blocks import Batch, batch_blocks
from memcalc.tasks.ppo_program import scoring_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.engines.base.holdings import Holdings
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

REWARD: Final = "reward model: "
LIFE: Final = "while the batch trains"
_NOTED_BEFORE: Final = 1
"""The numbers, besides entropies and probabilities, that only a micro-batch before has noted (`approxkl`)."""


def with_batch(holdings: Holdings, model: Model, setup: Setup) -> Holdings:
    """Return the holdings with the rows of PPO's training. Its loss is let go of with the mini-batch, so no rollout has one."""
    always = tuple(row for row in holdings.always if row.life != OF_CALLER[1])
    loss = tuple(row for row in holdings.always if row.life == OF_CALLER[1])
    batch = tuple(batch_rows(model, setup))
    step = max(
        (holdings.step, noted_rows(holdings, model, setup)), key=lambda rows: sum(row.bytes_at(1, 1) for row in rows)
    )
    return holdings._replace(
        always=(*always, *reward_rows(model, setup, holdings.buffer_dtype)),
        forward=(*holdings.forward, *batch),
        backward=(*holdings.backward, *batch, *loss),
        step=(*step, *batch, *loss),
        after_backward=tuple((*rows, *batch, *loss) for rows in holdings.after_backward),
        order=None,
    )


def reward_rows(model: Model, setup: Setup, buffer_dtype: DType | None) -> Iterator[Row]:
    """Yield the rows of the reward model: of the policy's configuration and dtypes, with a score in place of the head."""
    program: Any = model.whole.program
    kinds = Counter((weight.name, weight.shape) for weight in scoring_weights(program))
    for (name, shape), copies in kinds.items():
        yield Row("parameters", REWARD + name, shape, setup.compute_dtype, copies, "always", "exact", SOURCE)
    buffers = Counter(b._replace(layer=None) for b in after_forward(program.buffers(), setup.seq_len or 0))
    for one, copies in buffers.items():
        dtype = one.dtype or buffer_dtype or setup.compute_dtype
        yield Row("buffers", REWARD + one.name, one.shape, dtype, copies, "always", "exact", SOURCE)


def batch_rows(model: Model, setup: Setup) -> Iterator[Row]:
    """Yield the rows of the batch."""
    dtype = setup.compute_dtype
    program: Any = model.program
    for (name, shape, own), copies in Counter(batch_blocks(setup, program.vocab, dtype, dtype)).items():
        yield Row("buffers", f"batch: {name}", shape, own, copies, LIFE, "exact", SOURCE)


def noted_rows(holdings: Holdings, model: Model, setup: Setup) -> tuple[Row, ...]:
    """Return the rows of what is noted after a micro-batch, where that is most: with the gradients, if another one follows. They
    come on top of the micro-batch's variables, among which are what the one before has noted."""
    program: Any = model.program
    b, micro = Batch(setup), Dim("batch", setup.micro_batch_size)
    tokens = micro, b.completion
    dtype = fp32 if setup.autocast_dtype is not None else setup.compute_dtype

    def row(name: str, shape: Shape, of: DType = dtype) -> Row:
        return Row("temporaries", f"statistics: {name}", shape, of, 1, "after the step", "exact", SOURCE)

    gradients = holdings.forward if setup.micro_batches > 1 else ()
    below = row("logits below the largest", (*tokens, program.vocab))
    sums = row("largest logits", tokens), row("logsumexp", tokens)
    if not program.task.has_previous:
        return (*gradients, row("probabilities", (*tokens, program.vocab)), row("share", (), fp32), below, *sums)
    if setup.micro_batches > 2 * (setup.num_mini_batches or 1) or (setup.num_mini_batches or 1) > 1:
        return (*gradients, below, *sums)
    # of two micro-batches the first has no one before it: it finds less than what the variables of the second have
    fewer = 2 * sums[0].nbytes - _NOTED_BEFORE * fp32.itemsize - sums[0].nbytes
    return (*gradients, below, row("logsumexp", (Dim("bytes more than noted before", fewer),), uint8))
