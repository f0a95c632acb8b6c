"""A model with the step of a task, made from the options that say what trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memcalc.inputs.model import Model
from memcalc.tasks import OF_TRL
from memcalc.tuning.chosen import Chosen
from memcalc.tuning.tuned import tuned

if TYPE_CHECKING:
    from memcalc.tasks.task import Task


class ChosenTask(Chosen, Protocol):
    """Options or a setup: both say what a step trains for."""

    @property
    def task(self) -> str: ...
    @property
    def precompute_reference(self) -> bool | None: ...
    @property
    def padded(self) -> bool: ...
    @property
    def dp(self) -> int | None: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def global_batch_size(self) -> int | None: ...
    @property
    def completion_len(self) -> int | None: ...
    @property
    def steps_per_generation(self) -> int | None: ...
    @property
    def num_iterations(self) -> int | None: ...
    @property
    def beta(self) -> float | None: ...
    @property
    def packing(self) -> bool: ...
    @property
    def num_mini_batches(self) -> int | None: ...


def tasked(model: Model, chosen: ChosenTask) -> Model:
    """Return the model of which the chosen part trains, with the step of the chosen task. It is made once."""
    if chosen.task not in OF_TRL:
        return tuned(model.whole if model.task is not None else model, chosen)
    task = _task(chosen)
    base = tuned(model.whole, chosen)
    key = "task", chosen.task, task  # tuples of two tasks can be equal
    if key not in base.profiles:
        base.profiles[key] = _made(base, task, of_ppo=chosen.task == "ppo")
    return base.profiles[key]


def _task(chosen: ChosenTask) -> Task:
    """Return the task of options. Its module is imported on demand."""
    if chosen.task == "sft":
        from memcalc.tasks.sft import Sft

        return Sft(chosen.padded or chosen.packing)
    if chosen.task == "grpo":
        from memcalc.tasks.generating import grpo_of

        return grpo_of(chosen)
    if chosen.task == "ppo":
        from memcalc.tasks.ppo import ppo_of

        return ppo_of(chosen)  # type: ignore[return-value]
    how = bool(chosen.precompute_reference), chosen.padded
    if chosen.task == "kto":
        from memcalc.tasks.kto import Kto

        return Kto(*how)
    from memcalc.tasks.dpo import Dpo

    return Dpo(*how)


def _made(base: Model, task: Task, *, of_ppo: bool) -> Model:
    from memcalc.tasks.program import with_task, without_dropout

    if of_ppo:
        from memcalc.tasks.ppo_program import with_ppo

        policy, value = (without_dropout(one.program, base.model_type) for one in (base, base.whole))
        program = with_ppo(policy, value, task)  # type: ignore[arg-type]
    else:
        program = with_task(base.program, task, base.model_type)
    own = Model(base.name, base.model_type, program, base.fields, base.notes)
    own.tuning, own.whole, own.task = base.tuning, base.whole, task
    return own
