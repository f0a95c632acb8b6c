"""Proximal policy optimization as TRL's PPOTrainer runs it: what its options say of a rank's batch. TRL had the trainer until
1.12, among its experimental ones (trl/experimental/ppo)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from memcalc.tasks.tasked import ChosenTask

TRL_OF_PPO: Final = "TRL 1.12"
SOURCE: Final = "TRL 1.12 trl/experimental/ppo/ppo_trainer.py"
VALUE: Final = "value_model."
"""The beginning of the names of the value model's weights."""
EPOCHS: Final = 4
"""TRL's num_ppo_epochs."""
ROLLOUT_BATCH: Final = 64
"""TRL's local_rollout_forward_batch_size."""
TYPES: Final = ("llama", "gpt2", "qwen2", "gemma", "mistral", "qwen3", "phi3", "stablelm", "gpt_neox")
"""The types whose models of a policy, a value and a reward are checked."""


class Ppo(NamedTuple):
    """The batch of a rank, from one generation to the next."""

    completion_len: int
    """The tokens of a completion, the last ones of a sequence."""
    micro_batches: int
    """The micro-batches of the batch, and of an optimizer step."""
    mini_batches: int
    """The parts of the batch after which the trainer lets go of its variables. The optimizer steps once for all of them:
    accelerate counts micro-batches."""
    epochs: int
    """The optimizer steps on one batch (`num_ppo_epochs`)."""

    @property
    def per_example(self) -> int:
        return 1

    @property
    def has_previous(self) -> bool:
        """Tell whether a micro-batch may find the variables of the one before."""
        return self.micro_batches > self.mini_batches


def ppo_of(chosen: ChosenTask) -> Ppo:
    """Return PPO's batch of resolved options or of a setup."""
    from memcalc.tasks.generating import micro_batches

    assert chosen.completion_len is not None
    return Ppo(
        chosen.completion_len, micro_batches(chosen), chosen.num_mini_batches or 1, chosen.num_iterations or EPOCHS
    )
