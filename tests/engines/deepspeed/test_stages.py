"""DeepSpeed's own schedule and its own division of layers, against memcalc/engines/deepspeed/stages.py."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import itertools

from records import on_record

from memcalc.engines.deepspeed.stages import buffers, in_flight, instructions, spans

KINDS = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "LoadMicroBatch": "load",
    "RecvActivation": "receive activation",
    "RecvGrad": "receive gradient",
    "SendActivation": "send activation",
    "SendGrad": "send gradient",
}


@on_record
def train_schedule(micro_batches: int, stages: int, stage: int) -> tuple[int, list[tuple[str, int]]]:
    """Of TrainSchedule the pipe buffers, and its instructions with the buffer of each."""
    from deepspeed.runtime.pipe import schedule

    real = schedule.TrainSchedule(micro_batches, stages, stage)
    instructions = [c for step in real for c in step if type(c).__name__ in KINDS]
    return real.num_pipe_buffers(), [(KINDS[type(c).__name__], c.buffer_id) for c in instructions]


@on_record
def balanced(weights: list[int], stages: int) -> list[int]:
    from deepspeed.runtime.utils import partition_balanced

    return [int(end) for end in partition_balanced(weights, stages)]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 7])
def test_instructions_are_train_schedules(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        pipe_buffers, commands = train_schedule(micro_batches, stages, stage)
        assert [tuple(one) for one in instructions(stage, stages, micro_batches)] == commands
        assert buffers(stage, stages, micro_batches) == pipe_buffers
        live = most = 0
        for kind, _ in instructions(stage, stages, micro_batches):
            live += {"forward": 1, "backward": -1}.get(kind, 0)
            most = max(most, live)
        assert in_flight(stage, stages, micro_batches) == most


def test_layers_are_divided_as_transformer_layers_count() -> None:
    """Of Megatron-DeepSpeed's list two entries come before the layers and three after them, which weigh nothing."""
    for layers in range(2, 20):
        for stages in range(2, layers + 1):
            weights = [0, 0, *(1 for _ in range(layers)), 0, 0, 0]
            ends = balanced(weights, stages)
            real = [sum(weights[a:b]) for a, b in itertools.pairwise(ends)]
            assert [span.layers for span in spans(layers, stages)] == real
            assert ends[1] > 2 and ends[-2] < 2 + layers
