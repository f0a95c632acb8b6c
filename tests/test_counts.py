"""How many runs on paper, and of how many layers, a question may cost: what costs more fails on any machine."""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING, Any

import pytest

import memcalc
from memcalc.engines import ranks
from memcalc.report.table import print_report
from memcalc.tape import played, profile

if TYPE_CHECKING:
    from memcalc.tape.profile import Choices
    from memcalc.tape.runs import Trace


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers of every run that is made."""
    made: list[int] = []
    trace = profile.trace

    def counted(program: Any, choices: Choices, batch: int, seq: int, depth: int, *rest: Any) -> Trace:
        made.append(depth)
        return trace(program, choices, batch, seq, depth, *rest)

    for module in (profile, played):
        monkeypatch.setattr(module, "trace", counted)
    assert ranks.shallow_trace.__module__ == profile.__name__  # which calls it there
    return made


def test_the_first_command_of_the_readme(runs: list[int]) -> None:
    """One run of six layers for all that is printed, and one more for the advice to recompute."""
    report = memcalc.estimate("llama-7b", zero=3, gpus=8)
    _ = report.peak, report.items, report.collectives, report.device, report.flops
    assert runs == [6]
    print_report(report, rows=False, file=io.StringIO())
    assert runs == [6, 6]


@pytest.mark.parametrize("name", ["llama-3.1-405b", "qwen3-235b-a22b", "gemma-2-27b"])
@pytest.mark.parametrize(
    "engine", [{"engine": "deepspeed", "zero": 2}, {"engine": "deepspeed", "zero": 3}, {"engine": "fsdp2", "zero": 3}]
)
def test_no_stack_is_run_at_its_depth(name: str, engine: dict[str, Any], runs: list[int]) -> None:
    report = memcalc.estimate(name, gpus=64, **engine)
    _ = report.peak, report.items, report.collectives, report.device, report.flops
    deep = [depth for depth in runs if depth > 2]  # one or two tell in which order gradients are ready
    assert len(deep) == 1
    assert deep[0] < report.model.layers / 3


def test_rank_counts_batches_lengths_and_stages_share_runs(runs: list[int]) -> None:
    """928 setups: by what is recomputed, a batch of one or more, and the stage's own events."""
    model = memcalc.load_model("llama-7b")
    count = 0
    for gpus, zero, batch, seq, recompute in itertools.product(
        (1, 2, 4, 8, 16, 24, 64, 256), (0, 1, 2, 3), (1, 2, 4, 8), (512, 1000, 2048, 8192), ("none", "full")
    ):
        if gpus > 1 or not zero:
            _ = memcalc.estimate(
                model, gpus=gpus, zero=zero, micro_batch_size=batch, seq_len=seq, recompute=recompute
            ).peak
            count += 1
    assert count == 928
    assert len(runs) <= 17
    assert max(runs) == 6


@pytest.mark.parametrize("zero", [2, 3])
def test_rank_counts_of_fsdp2_share_a_run(zero: int, runs: list[int]) -> None:
    model = memcalc.load_model("mixtral-8x7b")
    for gpus in (2, 6, 8, 24, 64):
        _ = memcalc.estimate(model, engine="fsdp2", zero=zero, gpus=gpus).peak
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("engine", "most"),
    [({"engine": "ddp"}, 7), ({"engine": "deepspeed", "zero": 2}, 5), ({"engine": "fsdp2"}, 8)],
)
def test_an_array_question_costs_the_runs_of_its_branches(engine: dict[str, Any], most: int, runs: list[int]) -> None:
    """1120 setups: a batch of one or more by a sequence of one or more, with one micro-batch and with more; rank counts share
    them. Another question of the same branches costs none."""
    model = memcalc.load_model("llama-7b")
    gpus, batch = [[[[2]]], [[[8]]], [[[24]]], [[[64]]]], [[[1]], [[2]], [[3]], [[8]]]
    seq, step = [[1], [2], [512], [1000], [2048], [4096], [8192]], [2**i * 3 * 64 for i in range(10)]
    options: dict[str, Any] = {"gpus": gpus, "micro_batch_size": batch, **engine}
    found = memcalc.many(model, seq_len=seq, global_batch_size=step, **options)
    assert found.peak.shape == (4, 4, 7, 10)
    assert 0 < len(runs) <= most
    runs.clear()
    memcalc.many(model, seq_len=[[1], [3], [513], [8193]], global_batch_size=[n * 7 for n in step], **options)
    assert runs == []
