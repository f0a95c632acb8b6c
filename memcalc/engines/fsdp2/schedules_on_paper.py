"""The schedules of torch.distributed.pipelining on paper, over the stages of a rank: ScheduleGPipe, Schedule1F1B and
_PipelineScheduleRuntime (torch/distributed/pipelining/schedules.py).

Variables are bound where the real code binds them, because they decide what stays alive. A schedule whose actions can be
run one by one is a `Frame`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memcalc.pipelining.orders import COMPUTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.tensor import Tensor
    from memcalc.engines.fsdp2.pipeline_step import PaperStage
    from memcalc.pipelining.orders import Action


def gpipe(stage: PaperStage, micro_batches: int) -> None:
    """Run ScheduleGPipe._step_microbatches."""
    _output = ops = None
    log = stage.memory.log
    for i in range(micro_batches):
        begin = len(log)
        ops = None
        _output = stage.forward_one_chunk(i)
        ops = stage.fwd_sends(i)
        stage.compute_loss(i, _output)
        stage.places["forward", i] = range(begin, len(log))
    for i in range(micro_batches):
        begin = len(log)
        ops = None
        stage.backward_one_chunk(i)
        ops = stage.bwd_sends(i)
        stage.places["backward", i] = range(begin, len(log))
    stage.update_losses()
    stage.reduce()
    del ops


class Frame(Protocol):
    """A rank's schedule: what each of its actions does, and the variables that hold tensors from one action to the next."""

    keeps_output: bool
    """True if a variable holds the output of the last forward."""

    def act(self, action: Action) -> None: ...

    def variables(self) -> list[int | None]:
        """Return the numbers of the blocks that the variables hold, None in a place without one."""
        ...

    def is_last(self, i: int) -> bool:
        """Tell whether a forward's output stays in a variable until the end."""
        ...

    def end(self) -> None:
        """Do what comes behind the last action and the update of the losses."""
        ...


class OneForwardOneBackward:
    """Schedule1F1B._step_microbatches; `warmup` forwards come before the first backward."""

    keeps_output = True

    def __init__(self, stage: PaperStage, warmup: int, micro_batches: int) -> None:
        self.stage, self.warmup, self.micro_batches = stage, warmup, micro_batches
        self.output: Tensor | None = None
        self.fwd_sends: list[Tensor] = []
        self.bwd_sends: list[Tensor] = []

    def act(self, action: Action) -> None:
        stage, (kind, _, i) = self.stage, action
        assert i is not None
        if kind == "backward":
            stage.backward_one_chunk(i)
            self.bwd_sends = stage.bwd_sends(i)
            return
        self.output = stage.forward_one_chunk(i)
        if 0 <= i < self.warmup:
            self.fwd_sends = stage.fwd_sends(i)
            stage.compute_loss(i, self.output)
        else:
            stage.compute_loss(i, self.output)
            self.fwd_sends = stage.fwd_sends(i)

    def variables(self) -> list[int | None]:
        given = None if self.output is None else self.stage.last_given  # the graph behind the output holds it
        held = self.output, (*self.fwd_sends, None)[0], (*self.bwd_sends, None)[0]
        return [given, *(None if one is None else one.storage.index for one in held)]

    def is_last(self, i: int) -> bool:
        return i == self.micro_batches - 1

    def end(self) -> None:
        self.stage.reduce()
        self.fwd_sends = []
        self.output = None
        self.bwd_sends = []


class Runtime:
    """_PipelineScheduleRuntime._step_microbatches over the actions that it has made from an order (`lowered`)."""

    keeps_output = False

    def __init__(self, stages: Sequence[PaperStage]) -> None:
        self.stages = stages

    def act(self, action: Action) -> None:
        kind, chunk, i = action
        stage = self.stages[chunk]
        if kind in COMPUTES:
            stage.hooks.wait_for_all()
        if i is None:
            {
                "unshard": stage.hooks.unshard_all,
                "reshard": stage.hooks.reshard_all,
                "reduce": stage.reduce,
                "update": stage.update,
            }[kind]()
        elif kind == "forward":
            output = stage.forward_one_chunk(i)
            stage.compute_loss(i, output)
            stage.lead_on(i, output)
            del output
        elif kind == "backward":
            stage.backward_one_chunk(i)
        elif kind == "backward of inputs":
            stage.backward_input_one_chunk(i)
        elif kind == "backward of weights":
            stage.backward_weight_one_chunk(i)
        elif kind == "send backward":
            stage.bwd_sends(i)
        if i is not None and kind in ("backward", "backward of inputs"):
            for before in self.stages:
                if before.following is stage:
                    stage.lead_back(before, i)

    def variables(self) -> list[int | None]:
        return []

    def is_last(self, i: int) -> bool:
        return False

    def end(self) -> None: ...


def play(stages: Sequence[PaperStage], frame: Frame, actions: Sequence[Action]) -> None:
    """Run a schedule's actions, each by itself."""
    for action in actions:
        frame.act(action)
    for stage in stages:
        stage.update_losses()
    frame.end()
