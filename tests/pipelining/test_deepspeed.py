"""DeepSpeed's own schedule and its own division of layers, against memcalc/pipelining/deepspeed.py."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import itertools

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.utils import partition_balanced

from memcalc.pipelining.deepspeed import buffers, in_flight, instructions, spans

KINDS = {
    schedule.ForwardPass: "forward",
    schedule.BackwardPass: "backward",
    schedule.LoadMicroBatch: "load",
    schedule.RecvActivation: "receive activation",
    schedule.RecvGrad: "receive gradient",
    schedule.SendActivation: "send activation",
    schedule.SendGrad: "send gradient",
}


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 7])
def test_instructions_are_train_schedules(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        real = schedule.TrainSchedule(micro_batches, stages, stage)
        commands = [(KINDS[type(c)], c.buffer_id) for step in real for c in step if type(c) in KINDS]
        assert [tuple(one) for one in instructions(stage, stages, micro_batches)] == commands
        assert buffers(stage, stages, micro_batches) == real.num_pipe_buffers()
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
            ends = partition_balanced(weights, stages)
            real = [sum(weights[a:b]) for a, b in itertools.pairwise(ends)]
            assert [span.layers for span in spans(layers, stages)] == real
            assert ends[1] > 2 and ends[-2] < 2 + layers
