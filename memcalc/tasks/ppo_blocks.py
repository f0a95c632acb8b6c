"""The tensors of PPO's batch, from its rollout on: those that the trainer holds while the batch trains, and those that it never
lets go of before the next rollout has new ones (trl/experimental/ppo/ppo_trainer.py, the `del` statements of `train`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import Dim
from memcalc.core.dtypes import boolean, fp32, int64

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.setup.setup import Setup


Block = tuple[str, "Shape", "DType"]
"""The name, shape and dtype of a tensor."""


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
    yield "mean reward", (), fp32
    for _ in range(7):
        yield "statistics", (Dim("epochs·mini-batches·micro-batches", b.noted),), fp32


def last_blocks(setup: Setup) -> Iterator[Block]:
    """Yield the block of the last micro-batch that the trainer does not let go of with the mini-batch."""
    yield "losses of the value model", (Dim("batch", setup.micro_batch_size), Batch(setup).completion), fp32


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
