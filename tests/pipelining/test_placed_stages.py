"""Ranks of schedules that have a file each against torch's stages: every phase's peak and everything sent, byte for byte."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from pipeline_oracle import RankStep
from placed_stages_oracle import OF_TORCH, placed_step
from stages_compared import LLAMA, SHALLOW, WORKLOAD, counted, phases, real_phases, said
from steps_compared import flops_of

import memcalc
from memcalc.engines.fsdp2.pipeline import actions_of
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
    "zbv, middle": Case("zbv", 3, 1, 5, dp=1, layers=6),
    "zbv, one micro-batch": Case("zbv", 2, 1, 1),
    "zbv, few tokens": Case("zbv", 2, 0, 3, shallow=True),
    "zbv, many": Case("zbv", 2, 1, 9),
    "dualpipev, first": Case("dualpipev", 2, 0, 4),
    "dualpipev, last": Case("dualpipev", 2, 1, 5),
    "dualpipev, middle": Case("dualpipev", 3, 1, 6, dp=1, layers=6),
    "dualpipev, many": Case("dualpipev", 2, 1, 10),
    "dualpipev, few tokens": Case("dualpipev", 2, 1, 4, shallow=True),
    "naive": Case("naive", 2, 0, 3, zero=3),
    "naive, last": Case("naive", 2, 1, 5),
    "dapple, first": Case("dapple", 3, 0, 2),
    "dapple, many": Case("dapple", 2, 0, 8, zero=3),
    "dapple-b, middle": Case("dapple-b", 3, 1, 5),
    "chimera, first": Case("chimera", 2, 0, 4),
    "chimera, middle, zero 3": Case("chimera", 4, 1, 4, zero=3, dp=1),
    "chimera, last": Case("chimera", 4, 3, 8),
    "dualpipe, first": Case("dualpipe", 2, 0, 4),
    "dualpipe, last": Case("dualpipe", 4, 3, 8, dp=1),
    "dualpipe, middle": Case("dualpipe", 4, 1, 10, dp=1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step(name: str) -> None:
    report, real = both(CASES[name])
    assert phases(report) == real_phases(real)
    ours = said(report)
    if placement_of(CASES[name].schedule) == "both ways":  # the sum over both copies is not torch's
        ours = ours - type(ours)({key: n for key, n in ours.items() if key[1] == "all_reduce"})
    assert ours == counted(real)
    assert flops_of(report) == real.flops
