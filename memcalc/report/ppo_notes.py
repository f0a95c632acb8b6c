"""Notes on PPO: its models, its batch, and the phases before its training steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.report.idle_notes import idle_in_rollout
from memcalc.tasks.ppo import TRL_OF_PPO
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def notes_of_ppo(report: Report) -> list[str]:
    """Return the notes, one sentence or two each."""
    s, rollout = report.setup, report.rollout
    if rollout is None or s.completion_len is None or s.seq_len is None or s.num_iterations is None:
        return []
    local, steps = s.micro_batch_size * s.micro_batches, s.num_iterations
    shown = ", ".join(f"{name} {show_bytes(size)}" for name, size in rollout.peaks.items())
    reference = "the policy without its adapters is the reference" if s.lora_rank else "a reference"
    out = [
        f"ppo: as {TRL_OF_PPO}, the last version with a PPOTrainer; {reference}, and a reward model and a value model of the "
        "policy's configuration and dtype, with a score of one output in place of the head, are on every GPU",
        "ppo: parameters, gradients and optimizer states count the policy and the value model; parameters the other models too",
        f"ppo: a rank generates {_counted(local, 'completion')} of {_counted(s.completion_len, 'token')}, "
        f"{s.rollout_batch_size} at a time, behind "
        f"prompts of {_counted(s.seq_len - s.completion_len, 'token')} of one length; before the "
        f"{_counted(steps, 'optimizer step')} on them: {shown}",
        "ppo: the trainer keeps the fp32 logits of all responses' tokens from one generation to the next; time, FLOPs and "
        "communication are those of one optimizer step",
        idle_in_rollout(report),
    ]
    if s.recompute == "full":
        out.append(
            "ppo: the policy alone is recomputed; the trainer never switches it on, the user's model has to be given so"
        )
    if s.autocast_dtype is not None:
        out.append("ppo: generation, reference, values and rewards are outside autocast, in the dtype of the weights")
    if not report.is_of_step:
        out.append(f"ppo: the highest phase is {rollout.highest.name}, and not the training step")
    out.append("ppo: its allocations are not played through the allocator, whose reserve is assumed")
    return out


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
