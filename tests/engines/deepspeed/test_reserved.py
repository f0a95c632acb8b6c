"""What the allocator reserves for DeepSpeed: the estimate's replay against the sequence of its own engine, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_cases import DEEP, GPT2, LLAMA, MIXTRAL, SMALL_SETS, rank_played
from deepspeed_events import played, recorded

import memcalc
from memcalc.device.allocator import CachingAllocator
from memcalc.device.replay import replayed
from memcalc.device.shown import Workspaces
from memcalc.units import MIB

CASES: list[tuple[Any, dict[str, Any]]] = [
    (LLAMA, {"zero": 0, "gpus": 4, "micro_batch_size": 2, "recompute": "full"}),
    (GPT2, {"zero": 0, "gpus": 4, "precision": "fp32"}),
    (LLAMA, {"zero": 1, "gpus": 7, "reduce_bucket_size": 2 * 10**7}),
    (GPT2, {"zero": 1, "gpus": 2, "global_batch_size": 6, "precision": "fp16-mixed"}),
    (LLAMA, {"zero": 2, "gpus": 7}),
    (GPT2, {"zero": 2, "gpus": 8, "precision": "fp32", "global_batch_size": 16}),
    (MIXTRAL, {"zero": 2, "gpus": 8, "ep": 4}),
    (LLAMA, {"zero": 2, "gpus": 8, "cp": 2}),
    (LLAMA, {"zero": 3, "gpus": 3, "micro_batch_size": 2, "seq_len": 999}),
    (DEEP, {"zero": 3, "gpus": 64, **SMALL_SETS}),
    (
        DEEP,
        {"zero": 3, "gpus": 8, "recompute": "full", "micro_batch_size": 4, "param_persistence_threshold": 3 * 10**5},
    ),
    (GPT2, {"zero": 3, "gpus": 8, "precision": "fp16-mixed"}),
    (LLAMA, {"zero": 3, "gpus": 8, "cp": 2}),
]


@pytest.mark.parametrize(("config", "options"), CASES, ids=str)
def test_a_replay_reserves_what_the_engines_own_sequence_does(config: Any, options: dict[str, Any]) -> None:
    report = memcalc.estimate(config, engine="deepspeed", **{"seq_len": 512, **options})
    run = replayed(report.rank, report.setup, CachingAllocator(), Workspaces((), ()))
    assert run is not None and run.steady
    real = played(recorded(report, rank_played(report), run.steps))
    assert run.reserved == real.most_reserved


def test_where_the_flat_buffer_has_no_room_beside_the_weights_it_is_made_on_the_cpu() -> None:
    report = memcalc.estimate(LLAMA, engine="deepspeed", zero=2, gpus=64, reduce_bucket_size=10**6, seq_len=64)
    both = 2 * 2 * report.model.num_parameters
    run = replayed(report.rank, report.setup, CachingAllocator(both - MIB), Workspaces((), ()))
    assert run is not None and run.steady and not run.retries
    free = replayed(report.rank, report.setup, CachingAllocator(), Workspaces((), ()))
    assert free is not None and free.reserved > both
    real = played(recorded(report, rank_played(report), run.steps, roomy=False))
    assert run.reserved == real.most_reserved
