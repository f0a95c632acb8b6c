"""The peak of a rollout: what the engine holds between steps, and the highest moment of each phase without gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.inference.rollout import Phase, phases
from memcalc.tasks.generating import holds_gradients

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.core.rows import Row
    from memcalc.engines.rank import Rank
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup


class Rollout(NamedTuple):
    """The phases of a rollout on one rank."""

    resident: tuple[Row, ...]
    """The rows that are alive in all of them: weights, optimizer states, a reference, the batch before, and gradients of a step
    that has begun."""
    base: int
    """The bytes of `resident`."""
    parts: tuple[Phase, ...]

    @property
    def peaks(self) -> dict[str, int]:
        """Return the peak of each phase in bytes, in turn."""
        return {part.name: self.base + part.nbytes for part in self.parts}

    @property
    def highest(self) -> Phase:
        return max(self.parts, key=lambda part: part.nbytes)

    @property
    def peak(self) -> int:
        return self.base + self.highest.nbytes

    @property
    def rows(self) -> list[Row]:
        """Return every row that is alive at the peak."""
        return [*self.resident, *self.highest.rows]


def _phases(model: Model, setup: Setup, buffer_dtype: DType | None) -> tuple[Phase, ...]:
    if setup.task != "ppo":
        return phases(model, setup, buffer_dtype)
    from memcalc.inference import proximal_rollout  # whose programs only PPO needs

    return proximal_rollout.phases(model, setup, buffer_dtype)


def rollout_of(model: Model, setup: Setup, rank: Rank) -> Rollout:
    """Return the rollout of a rank. The runs on paper are made once for each of their sizes."""
    held = rank.holdings
    rows = (*held.always, *(held.forward if setup.task != "ppo" and holds_gradients(setup) else ()))
    base = sum(row.bytes_at(setup.micro_batch_size, setup.seq_len or 0) for row in rows)
    key = (
        "rollout", setup.micro_batch_size, setup.micro_batches, setup.steps_per_generation, setup.num_iterations, setup.seq_len,
        setup.completion_len, bool(setup.beta), setup.precision, setup.attention, setup.gpu, setup.engine, held.buffer_dtype,
        setup.reward_model,
    )  # fmt: skip
    if setup.task == "ppo":
        key = (*key, setup.rollout_batch_size, setup.num_mini_batches)
    if key not in model.profiles:
        model.profiles[key] = _phases(model, setup, held.buffer_dtype)
    return Rollout(rows, base, model.profiles[key])
