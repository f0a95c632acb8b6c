"""GRPO as options mean it: how many completions are generated together, and which log-probabilities come with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memcalc.tasks.grpo import Grpo

if TYPE_CHECKING:
    from memcalc.tasks.tasked import ChosenTask


class Generating(Protocol):
    """Options with their defaults resolved, or a setup."""

    @property
    def dp(self) -> int | None: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def global_batch_size(self) -> int | None: ...
    @property
    def steps_per_generation(self) -> int | None: ...
    @property
    def num_iterations(self) -> int | None: ...


def grpo_of(chosen: ChosenTask) -> Grpo:
    """Return GRPO's batch and loss of resolved options or of a setup."""
    assert chosen.completion_len is not None
    steps = chosen.steps_per_generation or 1
    return Grpo(chosen.completion_len, steps, keeps_old(chosen), bool(chosen.beta))


def keeps_old(chosen: Generating) -> bool:
    """Tell whether a step may train on completions of an earlier policy: the micro-batches of a step are not a multiple of those
    that use a generation (`generate_every`)."""
    return micro_batches(chosen) % generate_every(chosen) != 0


def holds_gradients(chosen: Generating) -> bool:
    """Tell whether completions may be generated while a step has gradients of its first micro-batches."""
    return generate_every(chosen) % micro_batches(chosen) != 0


def generate_every(chosen: Generating) -> int:
    """Return the micro-batches from one generation to the next."""
    return (chosen.steps_per_generation or 1) * (chosen.num_iterations or 1)


def micro_batches(chosen: Generating) -> int:
    """Return the micro-batches of a step."""
    unit = (chosen.dp or 1) * chosen.micro_batch_size
    return (chosen.global_batch_size or unit) // unit
