"""Programs of TRL's tasks: a family's program, whose forward now computes a trainer's loss, of a reference model too if
there is one."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32
from memcalc.core.tensor import Autocast
from memcalc.families.base.blocks import lm_head_loss
from memcalc.families.base.program import Program
from memcalc.tasks.fused_head import Asked, fused_lm_head, position_tiles
from memcalc.tasks.reference import reference_run

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Input, Run
    from memcalc.tasks.task import Task


class _Tasked(Program):
    """The base of the classes that `_class` makes: what a task changes of a program."""

    loss_dtype = fp32
    takes_losses = False
    task: Task

    def sequences(self, batch: Dim) -> Dim:
        return self.task.sequences(batch)

    def inputs(self, batch: Dim, seq: Dim) -> Sequence[Input]:
        return self.task.inputs(batch, seq)

    def given(self, batch: Dim, whole: Dim) -> Sequence[Input]:
        if self.packed_rows is not None:
            return super().given(batch, whole)
        return self.inputs(self.sequences(batch), whole)

    def branch(self, batch: int, seq: int) -> Hashable:
        sequences = self.task.per_example * batch
        scored = self.task.scored or seq - 1
        return super().branch(sequences, seq), position_tiles(sequences * scored)

    def forward(self, run: Run, *batch: Tensor) -> Tensor:
        return self.task.loss(Models(self, run), *batch)


class Models:
    """The policy and its reference, as a trainer calls them (`model(**batch, labels=labels, fused_lm_head=True)`)."""

    def __init__(self, program: _Tasked, run: Run) -> None:
        self.run = run
        self._program = program
        state = run.memory.autocast
        self._autocast = None if state is None else state.dtype
        self._dtype_of_forward = super(_Tasked, program).forward

    def policy(self, ids: Tensor, labels: Tensor, *, graph: bool = True) -> tuple[Tensor, ...]:
        """Run the policy. Returns its log-probabilities, and the other outputs."""
        return self._call(self.run, ids, labels, metrics=self._program.task.metrics, graph=graph)

    def reference(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Run the reference, without a graph. Returns its log-probabilities."""
        run = self.run
        if run.reference is None:
            run.reference = reference_run(self._program, run)
        start = len(run.memory.log)
        metrics = self._program.task.metrics if run.adapters is not None else ()
        log_probs = self._call(run.reference, ids, labels, metrics=metrics, graph=False)[0]
        run.of_reference.append(range(start, len(run.memory.log)))
        return log_probs

    def _call(
        self, run: Run, ids: Tensor, labels: Tensor, *, metrics: tuple[str, ...], graph: bool
    ) -> tuple[Tensor, ...]:
        """Run a model's forward, in a context of autocast of its own (accelerate's prepare_model)."""
        memory, enabled = run.memory, run.memory.grad_enabled
        memory.grad_enabled = graph
        scored = self._program.task.scored
        run.asked = asked = Asked(labels, metrics, None if scored is None else Dim("completion", scored))
        kernels = memory.kernels
        memory.kernels = {**kernels, lm_head_loss: fused_lm_head}
        try:
            with Autocast(memory, self._autocast):
                log_probs = self._dtype_of_forward(run, ids)
        finally:
            memory.grad_enabled = enabled
            memory.kernels = kernels
            run.asked = None
        return (log_probs, *asked.outputs)


_DROPOUT_MODULES: Final = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
"""The fields of configurations whose dropouts are modules, whatever the type."""
_OF_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "gpt_neox": ("hidden_dropout",), "stablelm": ("hidden_dropout",),
}  # fmt: skip
"""The fields whose dropouts are modules in some types, and functions in others."""


@cache
def _class(of: type[Program]) -> type[Program]:
    return type(f"{of.__name__}OfATask", (_Tasked, of), {})


def takes_head(program: Program) -> bool:
    """Tell whether TRL's head can take the place of a program's own: its forward ends with `lm_head_loss`, and no router has a
    loss of its own."""
    forward = getattr(type(program).forward, "__code__", None)
    ends = forward is not None and lm_head_loss.__name__ in forward.co_names
    return ends and not program.source and program.routed == (1, 1)


def with_task(program: Program, task: Task, model_type: str) -> Program:
    """Return a copy of the program whose step is the task's. Trainers of preferences switch off every nn.Dropout
    (`disable_dropout`), but not the dropout of attention weights that is a function."""
    own: Any = without_dropout(program, model_type) if task.disables_dropout else copy.copy(program)
    own.__dict__.pop("idle", None)
    own.__class__ = _class(type(program))
    own.task = task
    return own


def without_dropout(program: Program, model_type: str) -> Program:
    """Return a copy of the program whose nn.Dropout modules do nothing (`disable_dropout_in_model`)."""
    own: Any = copy.copy(program)
    switched_off = (*_DROPOUT_MODULES, *_OF_TYPES.get(model_type, ()))
    modules = {name: 0.0 for name in switched_off if getattr(own.config, name, None)}
    if modules:
        own.config = replace(own.config, **modules)
    if own.adapters is not None:
        own.adapters = replace(own.adapters, how=own.adapters.how._replace(dropout=0.0))
    return own


def without_task(program: Program) -> Program:
    """Return a copy of a task's program with the family's own forward."""
    _, _, of, *_ = type(program).__mro__  # as `_class` makes it
    own: Any = copy.copy(program)
    own.__class__ = of
    return own
