"""The calls of an engine are where it allocates what they fill."""

from __future__ import annotations

import pytest
from pictured import LLAMA, SETUPS, pictured

import memcalc
from memcalc.pictures.called import called
from memcalc.pictures.timeline import Span, timeline_of

WIDE = {**LLAMA, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6}
"""A model whose layers are larger than the buckets below."""
SMALL = {"engine": "deepspeed", "gpus": 4, "zero": 3, "prefetch_bucket_size": 10_000, "param_persistence_threshold": 0,
         "max_live_parameters": 1_000_000, "max_reuse_distance": 0, "reduce_bucket_size": 1_000_000}  # fmt: skip


@pytest.mark.parametrize("steps", [1, 4])
def test_parameters_are_gathered_where_their_blocks_come(steps: int) -> None:
    report = memcalc.estimate(dict(WIDE), **SMALL, seq_len=128, global_batch_size=4 * steps)
    timeline = timeline_of(report)
    found: set[Span] = set()
    for collective in report.collectives:
        if collective.collective == "all_gather" and collective.phase != "step":
            calls = called(collective, timeline, report)
            assert sum(one.calls for one in calls) * report.setup.micro_batches == collective.calls * min(steps, 3)
            assert sum(one.share for one in calls) == pytest.approx(min(steps, 3) / steps)
            found |= {one.part for one in calls}
    blocks = [block for block in timeline.blocks if block.name == "gathered parameters" and block.begin]
    parts = [part for part in timeline.parts if any(part.first < block.begin <= part.last for block in blocks)]
    assert len(parts) > 6
    assert found == set(parts)


def test_buckets_are_reduced_while_backward_runs() -> None:
    report = memcalc.estimate(dict(WIDE), **SMALL, seq_len=128)
    timeline = timeline_of(report)
    (buckets,) = (one for one in report.collectives if one.name == "gradient buckets")
    calls = called(buckets, timeline, report)
    assert len({one.part.layer for one in calls}) > 3
    assert {one.part.phase for one in calls} == {"backward"}


@pytest.mark.parametrize("name", [name for name in SETUPS if name != "deepspeed 3"])
def test_other_engines_note_none(name: str) -> None:
    report, timeline = pictured(name)
    assert not any(called(collective, timeline, report) for collective in report.collectives)
