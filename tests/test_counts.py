"""How many runs on paper, and of how many layers, a question may cost: what costs more fails on any machine."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from command import environment

import memcalc
from memcalc.engines import ranks
from memcalc.engines.deepspeed import zero3_step
from memcalc.engines.fsdp2.pipeline_step import PaperStage
from memcalc.engines.megatron import engine as megatron
from memcalc.report.table import print_report
from memcalc.tape import played, profile, resized

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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[None]]:
    """Returns a list that grows with every call of a module's function."""

    def counted(module: Any, name: str) -> list[None]:
        made: list[None] = []
        function = getattr(module, name)

        def call(*given: Any) -> Any:
            made.append(None)
            return function(*given)

        monkeypatch.setattr(module, name, call)
        return made

    return counted


def test_the_first_command_of_the_readme(runs: list[int]) -> None:
    """One run of four layers for all that is printed, and one more for the advice to recompute."""
    report = memcalc.estimate("llama-7b", zero=3, gpus=8)
    _ = report.peak, report.items, report.collectives, report.device, report.flops
    assert runs == [4]
    print_report(report, rows=False, file=io.StringIO())
    assert runs == [4, 4]


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


@pytest.mark.parametrize(("engine", "layers"), [("deepspeed", 20), ("fsdp2", 26)])
def test_a_stack_with_a_long_period_is_run_with_few_of_them(engine: str, layers: int, runs: list[int]) -> None:
    """Two periods of six layers, the ends, and what is left of 62 layers."""
    _ = memcalc.estimate("gemma-3-27b", gpus=64, engine=engine, zero=3).peak
    assert runs == [layers]


def test_a_deep_pipeline_runs_few_of_its_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 512 forwards of 16 micro-batches through 32 chunks."""
    made: list[int] = []
    forward = PaperStage.forward_one_chunk

    def counted(self: PaperStage, i: int) -> Any:
        made.append(i)
        return forward(self, i)

    monkeypatch.setattr(PaperStage, "forward_one_chunk", counted)
    deep = {"engine": "fsdp2", "zero": 2, "pp": 8, "schedule": "interleaved", "virtual_stages": 4}
    _ = memcalc.estimate("llama-7b", gpus=64, global_batch_size=128, **deep).peak
    assert 0 < len(made) <= 150


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
def test_rank_counts_of_fsdp2_share_a_run_and_its_moments(
    zero: int, runs: list[int], calls: Callable[[Any, str], list[None]]
) -> None:
    model, found = memcalc.load_model("mixtral-8x7b"), calls(resized, "peaks")
    for gpus in (2, 6, 8, 24, 64):
        _ = memcalc.estimate(model, engine="fsdp2", zero=zero, gpus=gpus).peak
    assert len(runs) == len(found) == 1


def test_batches_and_lengths_share_what_zero_3_does(calls: Callable[[Any, str], list[None]]) -> None:
    """A batch of one has a run of its own, in which modules begin and gradients are ready in the same order."""
    model, plays = memcalc.load_model("llama-7b"), calls(zero3_step, "play")
    for batch, seq in itertools.product((1, 2, 8), (512, 2048)):
        _ = memcalc.estimate(model, zero=3, gpus=8, micro_batch_size=batch, seq_len=seq).peak
    assert len(plays) == 1


def test_batches_lengths_and_recomputation_share_what_stages_hold(calls: Callable[[Any, str], list[None]]) -> None:
    model, held = memcalc.load_model("mixtral-8x7b"), calls(megatron, "holdings_of")
    layout: dict[str, Any] = {"engine": "megatron", "gpus": 16, "tp": 2, "pp": 4}
    for batch, seq, recompute in itertools.product((1, 2, 8), (512, 2048), ("none", "full")):
        _ = memcalc.estimate(model, **layout, micro_batch_size=batch, seq_len=seq, recompute=recompute).peak
    assert len(held) == 4


NOT_ASKED = (
    "families.base.experts", "layout.expert_parallel", "layout.tensor_parallel", "layout.tensor_dims.grid", "engines.branches",
    "engines.pipeline_ranks", "engines.transfers", "engines.deepspeed.zero2_step", "pipelining.programs", "pipelining.idle",
    "estimation.compute", "timing.kernels", "hardware.speed", "offload.host", "report.host", "report.pipeline_lines",
    "report.phases", "tape.peaks", "tape.kernels", "tape.resized", "tasks.fine_tuned", "setup.fsdp1_checks",
)  # fmt: skip
"""Modules that the first command of the README does not ask for."""


def test_the_first_command_imports_what_it_asks_for() -> None:
    code = """import io, json, sys
from memcalc.cli.main import main
sys.stdout = io.StringIO()
main(["estimate", "--model", "llama-7b", "--zero", "3", "--gpus", "8"])
print(json.dumps([name for name in sys.modules if name.startswith("memcalc.")]), file=sys.__stdout__)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), timeout=60, check=True)
    found = [name.removeprefix("memcalc.") for name in json.loads(done.stdout)]
    assert not {*found} & {*NOT_ASKED}
    assert len(found) <= 195


def test_names_of_engines_are_listed_without_their_modules() -> None:
    code = "import sys, memcalc.registry as r; list(r.ENGINES); print([n for n in sys.modules if n[:16] == 'memcalc.engines.'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), timeout=60, check=True)
    assert done.stdout.split() == [b"[]"]


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
