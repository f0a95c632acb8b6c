"""What a rank holds beside an engine's rows while PPO trains: the reward model, the batch that the rollout has left, and what the
trainer notes after a step (trl/experimental/ppo/ppo_trainer.py, `train`)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.rows import Row
from memcalc.engines.base.holdings import OF_CALLER
from memcalc.families.base.module import after_forward
from memcalc.tasks.ppo import SOURCE
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


def with_batch(holdings: Holdings, model: Model, setup: Setup) -> Holdings:
    """Return the holdings with the rows of PPO's training. Its loss is let go of with the mini-batch, so no rollout has one."""
    always = tuple(row for row in holdings.always if row.life != OF_CALLER[1])
    loss = tuple(row for row in holdings.always if row.life == OF_CALLER[1])
    batch = tuple(batch_rows(model, setup))
    step = max((holdings.step, noted_rows(holdings, model, setup)), key=lambda rows: sum(row.bytes_at(1, 1) for row in rows))
    return holdings._replace(
        always=(*always, *reward_rows(model, setup)),
        forward=(*holdings.forward, *batch),
        backward=(*holdings.backward, *batch, *loss),
        step=(*step, *batch, *loss),
        order=None,
    )


def reward_rows(model: Model, setup: Setup) -> Iterator[Row]:
    """Yield the rows of the reward model: of the policy's configuration and dtype, with a score in place of the head."""
    program: Any = model.whole.program
    kinds = Counter((weight.name, weight.shape) for weight in scoring_weights(program))
    for (name, shape), copies in kinds.items():
        yield Row("parameters", REWARD + name, shape, setup.compute_dtype, copies, "always", "exact", SOURCE)
    buffers = Counter(b._replace(layer=None) for b in after_forward(program.buffers(), setup.seq_len or 0))
    for one, copies in buffers.items():
        dtype = one.dtype or setup.compute_dtype
        yield Row("buffers", REWARD + one.name, one.shape, dtype, copies, "always", "exact", SOURCE)


class Batch:
    """The dims of a rank's batch."""

    def __init__(self, setup: Setup) -> None:
        assert setup.completion_len is not None and setup.seq_len is not None
        local = setup.micro_batch_size * setup.micro_batches
        chunk = setup.rollout_batch_size or local
        self.local, self.chunk = Dim("local batch", local), Dim("rollout batch", chunk)
        self.chunks = -(-local // chunk)
        self.last = Dim("last rollout batch", local - (self.chunks - 1) * chunk)
        self.padded = Dim("rollout batches", self.chunks * chunk)
        self.noted = (setup.num_iterations or 1) * (setup.num_mini_batches or 1) * setup.micro_batches
        """The numbers that the trainer makes room for, of each kind (`stats_shape`)."""
        self.seq = Dim("seq", setup.seq_len)
        self.completion = Dim("completion", setup.completion_len)
        self.prompt = Dim("prompt", setup.seq_len - setup.completion_len)


Block = tuple[str, "Shape", "DType"]


def stale_blocks(setup: Setup, vocab: Dim, values_in: DType) -> Iterator[Block]:
    """Yield the blocks of a rollout that its trainer never lets go of before the next rollout has new ones."""
    b = Batch(setup)
    whole = b.local, b.completion
    yield "prompts", (b.local, b.prompt), int64
    yield "prompts' mask", (b.local, b.prompt), int64
    yield "logits of all responses' tokens", (b.padded, b.completion, vocab), fp32
    yield "queries and responses", (b.padded, b.seq), int64
    yield "queries and postprocessed responses", (b.last, b.seq), int64
    yield "lengths of responses", (b.last,), int64
    yield "lengths of sequences", (b.last,), int64
    yield "logarithms of ratios", whole, fp32
    yield "advantage of a token", (b.local,), fp32
    if b.completion.size > 1:
        yield "values", whole, values_in
    for _ in range(b.completion.size):
        yield "advantages of a token", (b.local,), fp32
    for _ in range(7):
        yield "statistics", (Dim("epochs·mini-batches·micro-batches", b.noted),), fp32


def batch_blocks(setup: Setup, vocab: Dim, values_in: DType, logits_in: DType) -> Iterator[Block]:
    """Yield the blocks of a rollout that are alive while its batch trains."""
    b = Batch(setup)
    whole = b.local, b.completion
    yield from stale_blocks(setup, vocab, values_in)
    if b.completion.size == 1:
        yield "values", whole, values_in
    yield "responses", whole, int64
    yield "postprocessed responses", whole, int64
    yield "log-probabilities", whole, fp32
    yield "reference log-probabilities", whole, logits_in
    yield "places of tokens", whole, int64
    for name in ("lengths of responses", "lengths of values", "sequences", "last tokens"):
        yield name, (b.local,), int64
    yield "scores", (b.local,), values_in
    yield "sequences that end", (b.local,), boolean
    yield "padding of responses", whole, boolean
    yield "padding of values", whole, boolean
    for name in ("distances from the reference", "rewards without scores", "rewards", "advantages", "returns"):
        yield name, whole, fp32


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

    new = () if program.task.has_previous else (row("probabilities", (*tokens, program.vocab)), row("share", (), fp32))
    gradients = holdings.forward if setup.micro_batches > 1 else ()
    return (
        *gradients,
        *new,
        row("logits below the largest", (*tokens, program.vocab)),
        row("largest logits", tokens),
        row("logsumexp", tokens),
    )
