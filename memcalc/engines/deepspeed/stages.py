"""DeepSpeed's pipeline: the layers of each stage, and the instructions of its one schedule.

Sources, in deepspeed/runtime/pipe: module.py (`partition_method='type:transformer'`, which is Megatron-DeepSpeed's)
with runtime/utils.py (partition_balanced), schedule.py (TrainSchedule).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from memcalc.megatron.schedules import Span

Kind = Literal[
    "forward", "backward", "load", "receive activation", "receive gradient", "send activation", "send gradient"
]


class Instruction(NamedTuple):
    """An action of a stage on one of its buffers."""

    kind: Kind
    buffer: int


def spans(layers: int, stages: int) -> list[Span]:
    """Return the layers of each stage. Only transformer layers count; the first stages have one more if they do not
    divide."""
    each, rest = divmod(layers, stages)
    out: list[Span] = []
    start = 0
    for stage in range(stages):
        count = each + (stage < rest)
        out.append(Span(start, count, stage == 0, stage == stages - 1))
        start += count
    return out


def buffers(stage: int, stages: int, micro_batches: int) -> int:
    """Return the number of a stage's buffers (TrainSchedule.num_pipe_buffers)."""
    return max(2, min(stages - stage, micro_batches))


def instructions(stage: int, stages: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield TrainSchedule.steps, without the reductions and the step at its end.

    Of two steps in a row one is a forward and one a backward, if their micro-batches exist. The output of a step is
    sent in the next one.
    """
    count = buffers(stage, stages, micro_batches)
    first, last = stage == 0, stage == stages - 1
    before = -1
    for step in range(2 * (micro_batches + stages - 1)):
        forward = (step - stage) % 2 == 0
        i = (step - stage) // 2 if forward else (step + stage + 1) // 2 - stages
        runs, had = 0 <= i < micro_batches, 0 <= before < micro_batches
        own, other = i % count, before % count
        if forward and had and not first:
            yield Instruction("send gradient", other)
        if runs and not (first if forward else last):
            yield Instruction("receive activation" if forward else "receive gradient", own)
        if not forward and had and not last:
            yield Instruction("send activation", other)
        if forward and runs and (first or last):
            yield Instruction("load", own)
        if runs:
            yield Instruction("forward" if forward else "backward", own)
        before = i


def in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Return the most forwards whose backward is not over, the running one included."""
    return min(stages - stage, micro_batches)


def enough_micro_batches(stage: int, stages: int, micro_batches: int) -> int:
    """Return the number of micro-batches whose step has all states of a longer one: those in the middle repeat each
    other."""
    return min(micro_batches, stages - stage + 4)
