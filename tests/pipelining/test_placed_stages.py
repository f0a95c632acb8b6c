"""Ranks of schedules that have a file each against torch's stages: every phase's peak and everything sent, byte for byte."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from pipeline_oracle import RankStep
from placed_stages_oracle import OF_TORCH, placed_step
from stages_compared import LLAMA, SHALLOW, WORKLOAD, counted, phases, real_phases, said
from steps_compared import flops_of

import memcalc
from memcalc.engines.fsdp2.pipeline import actions_of, staged_ranks
from memcalc.estimation.report import Report
from memcalc.pipelining.orders import order
from memcalc.pipelining.placement import places, stages
from memcalc.pipelining.programs import spans
from memcalc.pipelining.schedules import of_each_chunk, placement_of, schedule_of


class Case(NamedTuple):
    """A pipeline, one of its ranks, and the ZeRO stage."""

    schedule: str
    ranks: int
    rank: int
    micro_batches: int
    dp: int = 2
    zero: int = 2
    shallow: bool = False
    layers: int = 8


def both(case: Case, **options: Any) -> tuple[Report, RankStep]:
    config = LLAMA | {"num_hidden_layers": case.layers}
    workload: dict[str, Any] = dict(SHALLOW if case.shallow else WORKLOAD)
    many, chunks = case.micro_batches, schedule_of(case.schedule).chunks
    placement = placement_of(case.schedule)
    report = memcalc.estimate(
        dict(config), engine="fsdp2", zero=case.zero, gpus=case.ranks * case.dp, pp=case.ranks, pp_rank=case.rank,
        schedule=case.schedule, global_batch_size=case.dp * many * workload["micro_batch_size"],
        optimizer_implementation="fused", **workload, **options,
    )  # fmt: skip
    given: dict[str, Any] = {}
    if placement == "both ways":
        given["actions"] = actions_of(report.setup, case.rank, many)
    elif case.schedule not in OF_TORCH:
        given["orders"] = [order(case.schedule, rank, case.ranks, many) for rank in range(case.ranks)]
    real = placed_step(
        config, schedule=case.schedule, rank=case.rank, ranks=case.ranks, micro_batches=many,
        spans=[(one.start, one.layers) for one in spans(case.layers, case.ranks, chunks, None, None, placement)[case.rank]],
        stages=[at.stage for at in places(placement, case.rank, case.ranks, chunks)],
        of_stages=stages(placement, case.ranks, chunks), of_each=of_each_chunk(case.schedule, many), dp=case.dp,
        reshards=None if case.zero == 3 else False, **workload, **given,
    )  # fmt: skip
    return report, real


CASES: dict[str, Case] = {
    "zbv, first": Case("zbv", 2, 0, 4),
    "zbv, last": Case("zbv", 2, 1, 4),
    "dualpipev, last": Case("dualpipev", 2, 1, 5),
    "dapple, first": Case("dapple", 3, 0, 2),
    "chimera, first": Case("chimera", 2, 0, 4),
    "dualpipe, first": Case("dualpipe", 2, 0, 4),
}
MORE: dict[str, Case] = {
    "zbv, middle": Case("zbv", 3, 1, 5, dp=1, layers=6),
    "zbv, one micro-batch": Case("zbv", 2, 1, 1),
    "zbv, few tokens": Case("zbv", 2, 0, 3, shallow=True),
    "zbv, many": Case("zbv", 2, 1, 9),
    "dualpipev, first": Case("dualpipev", 2, 0, 4),
    "dualpipev, middle": Case("dualpipev", 3, 1, 6, dp=1, layers=6),
    "dualpipev, many": Case("dualpipev", 2, 1, 10),
    "dualpipev, few tokens": Case("dualpipev", 2, 1, 4, shallow=True),
    "naive": Case("naive", 2, 0, 3, zero=3),
    "naive, last": Case("naive", 2, 1, 5),
    "dapple, many": Case("dapple", 2, 0, 8, zero=3),
    "dapple-b, middle": Case("dapple-b", 3, 1, 5),
    "chimera, middle, zero 3": Case("chimera", 4, 1, 4, zero=3, dp=1),
    "chimera, last": Case("chimera", 4, 3, 8),
    "dualpipe, last": Case("dualpipe", 4, 3, 8, dp=1),
    "dualpipe, middle": Case("dualpipe", 4, 1, 10, dp=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_a_step(name: str) -> None:
    case = (CASES | MORE)[name]
    report, real = both(case)
    assert phases(report) == real_phases(real)
    ours = said(report)
    if placement_of(case.schedule) == "both ways":  # the sum over both copies is not torch's
        ours = ours - type(ours)({key: n for key, n in ours.items() if key[1] == "all_reduce"})
    assert ours == counted(real)
    assert flops_of(report) == real.flops


ASYNCHRONOUS: dict[str, tuple[Case, str]] = {
    "pipedream, first": (Case("pipedream", 3, 0, 6, layers=6), "fused"),
    "pipedream, middle, zero 3": (Case("pipedream", 3, 1, 5, zero=3, layers=6), "foreach"),
    "pipedream, last": (Case("pipedream", 2, 1, 4), "fused"),
    "2bw, first": (Case("pipedream-2bw", 2, 0, 5), "foreach"),
    "2bw, last, zero 3": (Case("pipedream-2bw", 3, 2, 4, zero=3, dp=1, layers=6), "fused"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if "first" in name else pytest.param(name, marks=pytest.mark.slow) for name in ASYNCHRONOUS]
)
def test_a_step_with_updates_while_others_are_in_flight(name: str) -> None:
    """torch's stages in PipeDream's order, with an optimizer's step at each update; older versions of the weights are not
    torch's."""
    case, implementation = ASYNCHRONOUS[name]
    config = LLAMA | {"num_hidden_layers": case.layers}
    report = memcalc.estimate(
        dict(config), engine="fsdp2", zero=case.zero, gpus=case.ranks * case.dp, pp=case.ranks, pp_rank=case.rank,
        schedule=case.schedule, global_batch_size=case.dp * case.micro_batches * WORKLOAD["micro_batch_size"],
        optimizer_implementation=implementation, **WORKLOAD,
    )  # fmt: skip
    many = case.micro_batches * (2 if case.schedule == "pipedream-2bw" else 1)
    real = placed_step(
        config, schedule=case.schedule, rank=case.rank, ranks=case.ranks, micro_batches=many,
        spans=[(one.start, one.layers) for one in spans(case.layers, case.ranks)[case.rank]], stages=[case.rank],
        of_stages=case.ranks, of_each=many, dp=case.dp, actions=actions_of(report.setup, case.rank, many),
        reshards=None if case.zero == 3 else False, implementation=implementation, **WORKLOAD,
    )  # fmt: skip
    older = sum(item.nbytes for item in report.items if "older version" in item.name)
    spare = (many - case.micro_batches) * _of_the_batch(case, config)
    if implementation == "foreach":  # its counts of steps are in the host's memory, which the real run counts too
        own = staged_ranks(report.model, report.setup)[case.rank].program
        spare += 4 * sum(1 for _ in own.weights())
    theirs = real_phases(real)
    if case.rank == case.ranks - 1:
        # The last update of the real run comes after all losses, and the caller has the old ones.
        theirs[2] -= 4 * many
    assert [nbytes - older + spare for nbytes in phases(report)] == theirs
    sends = report.setup.micro_batches
    ways = 1 if case.rank in (0, case.ranks - 1) else 2
    assert [c.calls for c in report.collectives if c.axis == "pp"] == [sends] * ways


def _of_the_batch(case: Case, config: dict[str, Any]) -> int:
    """The bytes that the real run has of each micro-batch of a second step: buffers for all that is received, and the ids."""
    tokens = WORKLOAD["micro_batch_size"] * WORKLOAD["seq_len"]
    first, last = case.rank == 0, case.rank == case.ranks - 1
    received = tokens * config["hidden_size"] * 2 * (2 - first - last)
    return received + (tokens * 8 if first or last else 0) + 4 * last


MANY = [
    ("naive", 2, 9), ("dapple", 3, 12), ("dapple-b", 2, 11), ("chimera", 4, 24), ("chimera", 2, 14), ("dualpipe", 2, 16),
    ("dualpipe", 4, 18), ("dualpipev", 2, 14), ("dualpipev", 3, 15), ("zbv", 2, 13), ("zbv", 3, 17), ("zbv", 4, 16),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches"), MANY)
@pytest.mark.parametrize("workload", [SHALLOW, pytest.param(WORKLOAD, marks=pytest.mark.slow)])
def test_micro_batches_in_the_middle_repeat_themselves(
    schedule: str, ranks: int, micro_batches: int, workload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left out of a run changes no number of any rank."""

    def found() -> list[Any]:
        report = memcalc.estimate(
            LLAMA | {"num_hidden_layers": 2 * ranks}, engine="fsdp2", zero=2, gpus=2 * ranks, pp=ranks, schedule=schedule,
            global_batch_size=2 * micro_batches * workload["micro_batch_size"], **workload,
        )  # fmt: skip
        ranks_of = report.each_rank()
        return [(one.phases, said(one), flops_of(one), one.in_flight) for one in ranks_of]

    few = found()
    monkeypatch.setattr("memcalc.engines.fsdp2.pipeline.enough_micro_batches", lambda *of: of[3])
    assert found() == few
