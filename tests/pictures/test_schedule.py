"""The lanes of a pipeline: the order of each engine, and the idle time that the report states."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.engines.deepspeed.stages import instructions
from memcalc.inputs.options import check_options
from memcalc.megatron import schedules as megatron
from memcalc.pictures.schedule import drawable, lanes
from memcalc.pipelining import orders
from memcalc.pipelining.idle import idle_share
from memcalc.pipelining.orders import waited
from memcalc.setup.resolved import resolve
from memcalc.setup.setup import Setup

BASE: dict[str, Any] = {"pp": 4, "gpus": 4, "global_batch_size": 16}
SETUPS = {
    "megatron gpipe": {"engine": "megatron", "schedule": "gpipe"},
    "megatron 1f1b": {"engine": "megatron"},
    "megatron interleaved": {"engine": "megatron", "schedule": "interleaved", "virtual_stages": 2},
    "deepspeed": {"engine": "deepspeed"},
    "fsdp2 gpipe": {"engine": "fsdp2", "schedule": "gpipe"},
    "fsdp2 1f1b": {"engine": "fsdp2"},
    "fsdp2 interleaved": {"engine": "fsdp2", "schedule": "interleaved", "virtual_stages": 2},
    "fsdp2 zero-bubble": {"engine": "fsdp2", "schedule": "zero-bubble", "zero": 2},
}  # fmt: skip
ALL = pytest.mark.parametrize("name", SETUPS)


MODEL = memcalc.load_model("llama-7b")


def setup_of(name: str, **options: Any) -> Setup:
    return resolve(check_options({**BASE, **SETUPS[name], **options}), MODEL)


@ALL
@pytest.mark.parametrize("micro_batches", [8, 16, 64])
def test_idle_times_are_the_stated_bubble(name: str, micro_batches: int) -> None:
    setup = setup_of(name, global_batch_size=micro_batches)
    assert waited(lanes(setup, micro_batches)) == pytest.approx(idle_share(setup))


@ALL
def test_each_rank_keeps_the_order_of_its_engine(name: str) -> None:
    setup = setup_of(name)
    for rank, lane in enumerate(lanes(setup, 16)):
        own = [(one.action.kind, one.action.chunk) for one in lane]
        if setup.engine == "fsdp2":
            assert [one.action for one in lane] == orders.order(setup.schedule, rank, 4, 16, setup.virtual_stages)
        elif setup.engine == "deepspeed":
            assert own == [(kind, 0) for kind, _ in instructions(rank, 4, 16) if kind in ("forward", "backward")]
        else:
            assert own == list(megatron.actions(setup.schedule, rank, 4, 16, setup.virtual_stages))


@ALL
def test_nothing_runs_before_its_input_is_there(name: str) -> None:
    setup = setup_of(name)
    every = lanes(setup, 8)
    ends = {(one.action.kind, one.action.chunk * 4 + rank, one.action.micro_batch): one.end for rank, lane in enumerate(every)
            for one in lane}  # fmt: skip
    last = 4 * setup.virtual_stages - 1
    for rank, lane in enumerate(every):
        clock = 0
        for one in lane:
            kind, stage, i = one.action.kind, one.action.chunk * 4 + rank, one.action.micro_batch
            assert one.start >= clock
            clock = one.end
            if kind == "forward" and stage:
                assert one.start >= ends["forward", stage - 1, i]
            if kind in ("backward", "backward of inputs"):
                assert one.start >= (ends["forward", stage, i] if stage == last else ends[kind, stage + 1, i])


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("micro_batches", [4, 16, 4096])
@pytest.mark.parametrize("most", [1, 40, 300])
def test_as_many_micro_batches_as_there_is_room_for(name: str, micro_batches: int, most: int) -> None:
    setup = setup_of(name, global_batch_size=micro_batches)
    drawn = drawable(setup, most)
    assert 4 <= drawn <= micro_batches
    every = lanes(setup, drawn)
    assert sum(map(len, every)) <= max(most, sum(map(len, lanes(setup, 4))))
    assert {one.action.micro_batch for one in every[0]} == set(range(drawn))
