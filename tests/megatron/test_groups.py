"""Groups of micro-batches that are not as many as ranks, against Megatron-Core's own interleaved schedule."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest import mock

import megatron_schedule_oracle as oracle
import pytest

import memcalc
from memcalc.megatron import schedules
from memcalc.megatron.between_stages import between, left

CASES = [
    pytest.param(2, 6, 2, 3, id="2 stages, groups of 3"),
    pytest.param(4, 5, 3, 5, id="4 stages, one group", marks=pytest.mark.slow),
    pytest.param(2, 8, 2, 3, id="2 left over"),
    pytest.param(3, 11, 2, 4, id="3 stages, 3 left over", marks=pytest.mark.slow),
]


def besides(seen: Iterable[oracle.Moment]) -> list[int]:
    """Less the inputs of what is in flight, that of what runs, and in backward the gradient that came in."""
    live: Counter[int] = Counter()
    out: list[int] = []
    for moment in seen:
        if moment.kind == "backward":
            live[moment.chunk] -= 1
        out.append(moment.alive - sum(live.values()) - 1 - (moment.kind == "backward"))
        if moment.kind == "forward":
            live[moment.chunk] += 1
    return out


def real(group: int, *step: int) -> Any:
    def config(ranks: int, chunks: int) -> Any:
        made = plain(ranks, chunks)
        made.microbatch_group_size_per_vp_stage = group
        return made

    plain = oracle._config  # pyright: ignore[reportPrivateUsage]
    with mock.patch.object(oracle, "_config", config):
        return inspect.unwrap(oracle.moments)(*step)


@pytest.mark.parametrize(("ranks", "micro_batches", "chunks", "group"), CASES)
def test_every_moment_of_every_rank(ranks: int, micro_batches: int, chunks: int, group: int) -> None:
    for rank in range(ranks):
        remaining, seen = real(group, rank, ranks, micro_batches, chunks)
        order = list(schedules.actions("interleaved", rank, ranks, micro_batches, chunks, group))
        assert order == [(moment.kind, moment.chunk) for moment in seen]
        warmup = schedules.warmup_of("interleaved", rank, ranks, micro_batches, chunks, group)
        assert list(between(order, warmup, rank, ranks, chunks, group)) == besides(seen)
        assert left(rank, chunks) == remaining


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("rest", [0, 4, 5])
def test_states_repeat(rank: int, rest: int) -> None:
    """So many groups as `states` looks at show all there are."""
    shown = set(schedules.states("interleaved", rank, 4, 6 * 7 + rest, 3, 6))
    with mock.patch.object(schedules, "_ENOUGH", 7):
        assert set(schedules.states("interleaved", rank, 4, 6 * 7 + rest, 3, 6)) == shown


def test_fewer_left_over_than_ranks_are_refused() -> None:
    with pytest.raises(RuntimeError):
        real(4, 0, 2, 9, 3)
    setup = {"gpus": 2, "pp": 2, "engine": "megatron", "schedule": "interleaved", "virtual_stages": 4, "seq_len": 64}
    with pytest.raises(memcalc.InputError, match=r"--microbatch-group-size 4: 9 micro-batches per step leave 1"):
        memcalc.estimate("llama-7b", **setup, global_batch_size=9, microbatch_group_size=4)
    with pytest.raises(memcalc.InputError, match=r"--schedule interleaved: .* not 9"):
        memcalc.estimate("llama-7b", **setup, global_batch_size=9)
    assert memcalc.estimate("llama-7b", **setup, global_batch_size=9, microbatch_group_size=3).peak


def test_the_ranks_are_the_default() -> None:
    setup = {"gpus": 2, "pp": 2, "engine": "megatron", "schedule": "interleaved", "virtual_stages": 4, "seq_len": 64}
    one, other = (
        memcalc.estimate("llama-7b", **setup, global_batch_size=8, **more)
        for more in ({}, {"microbatch_group_size": 2})
    )
    assert one.to_dict() == other.to_dict()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"stage_layers": "16,16,0"}, "--stage-layers 16,16,0: has 3 stages; allowed: pp 2"),
        ({"stage_layers": "16,17"}, "--stage-layers 16,17: has 33 layers"),
        ({"stage_layers": "16;16"}, "--stage-layers 16;16: allowed: the layers of each stage"),
        ({"stage_layers": "-1,33"}, "--stage-layers -1,33: allowed"),
        ({"stage_layers": "16,16", "first_stage_layers": 16}, "--stage-layers 16,16: has the first"),
        ({"stage_layers": "16,16", "engine": "fsdp2"}, "--stage-layers 16,16: needs --engine megatron"),
        ({"stage_layers": "16,0,16,0", "pp": 4, "gpus": 4}, "--stage-layers 16,0,16,0: a stage between"),
        ({"stage_layers": "32", "pp": 1}, "--stage-layers 32: needs --engine megatron and --pp 2"),
        ({"wgrad_deferral_limit": 0, "pp": 1}, "--wgrad-deferral-limit 0: needs --engine megatron and --pp 2"),
        (
            {"wgrad_deferral_limit": 2, "gradient_accumulation_fusion": False},
            "--wgrad-deferral-limit 2: Megatron defers no gradient",
        ),
        ({"microbatch_group_size": 4}, "--microbatch-group-size 4: needs a pipeline with --virtual-stages 2"),
        (
            {"microbatch_group_size": 1, "schedule": "interleaved", "virtual_stages": 2},
            "--microbatch-group-size 1: Megatron wants at least pp 2",
        ),
    ],
)
def test_what_megatron_refuses(more: dict[str, Any], named: str) -> None:
    setup = {"gpus": 2, "pp": 2, "engine": "megatron", "seq_len": 64, "global_batch_size": 4}
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate("llama-7b", **{**setup, **more})
    assert str(error.value).startswith(named)
    assert "\n" not in str(error.value)


def test_stages_written_out_are_the_equal_ones() -> None:
    setup = {"gpus": 2, "pp": 2, "engine": "megatron", "seq_len": 64}
    one, other = (memcalc.estimate("llama-7b", **setup, **more) for more in ({}, {"stage_layers": " 16, 16"}))
    assert (one.peak, one.rank_peaks) == (other.peak, other.rank_peaks)
    skewed = memcalc.estimate("llama-7b", **setup, stage_layers="20,12")
    assert skewed.rank_peaks[0] > one.rank_peaks[0]
    assert skewed.rank_peaks[1] < one.rank_peaks[1]


@pytest.mark.parametrize(("limit", "waiting"), [(0, 7), (1, 1), (3, 3), (7, 7), (100, 7)])
def test_gradients_of_the_head_wait_on_the_last_stage(limit: int, waiting: int) -> None:
    """Those of the micro-batches before the last one (LinearWithGradAccumulationAndAsyncCommunication)."""
    setup: dict[str, Any] = {"gpus": 2, "pp": 2, "engine": "megatron", "seq_len": 64, "global_batch_size": 8}
    for rank, count in ((0, 0), (1, waiting)):
        plain = memcalc.estimate("llama-7b", **setup, pp_rank=rank)
        other = memcalc.estimate("llama-7b", **setup, pp_rank=rank, wgrad_deferral_limit=limit)
        each = 64 * (32000 + 4096) * 2
        assert other.phases["backward"] - plain.phases["backward"] == count * each
        assert other.phases["step"] == plain.phases["step"]
