"""Gradients of a pipeline's stages clipped by their norm: torch's get_total_norm over a rank's shards, and one number summed
over the stages, as torchtitan does it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from stages_compared import KEPT, LLAMA, SHALLOW, ZERO_2, Case, both, check, phases, real_phases
from validated import validate

import memcalc
from memcalc.estimation.report import Report

EVEN = LLAMA | {"vocab_size": 300, "num_hidden_layers": 4}
CLIPS: dict[str, Any] = {"clip_grad_norm": True}
SEQUENCE = ({**CLIPS, "sequence_parallel": True}, {"clips": True, "plan": "sequence parallel"})
LOSS = ({**SEQUENCE[0], "cross_entropy": "vocab-parallel"}, {"clips": True, "plan": "loss parallel"})
FP32 = ({**CLIPS, **ZERO_2, "precision": "fp32"}, {**KEPT, "policy": None, "clips": True})
HYBRID = (
    {**CLIPS, "shard_group": 2, "precision": "bf16"},
    {"clips": True, "replicas": 2, "policy": None, "dtype": torch.bfloat16},
)

CASES: dict[str, Case] = {
    "1f1b, first": Case("1f1b", 3, 0, 4, options=CLIPS, real={"clips": True}),
    "1f1b, last, one GPU a stage": Case("1f1b", 2, 1, 2, dp=1, options=CLIPS, real={"clips": True}),
    "gpipe, fp32, middle": Case("gpipe", 3, 1, 2, options=FP32[0], real=FP32[1]),
    "hybrid, bf16": Case("1f1b", 2, 0, 2, dp=4, options=HYBRID[0], real=HYBRID[1]),
    "interleaved": Case("interleaved", 2, 1, 2, chunks=2, options=CLIPS, real={"clips": True}),
    "zero-bubble": Case("zero-bubble", 2, 0, 3, options={**CLIPS, **ZERO_2}, real={**KEPT, "clips": True}),
    "cp": Case(
        "1f1b",
        2,
        0,
        2,
        dp=1,
        cp=2,
        options=CLIPS,
        real={"clips": True},
        workload={"micro_batch_size": 1, "seq_len": 32},
    ),
    "sequence parallel, first": Case("1f1b", 2, 0, 2, tp=2, options=SEQUENCE[0], real=SEQUENCE[1]),
    "sequence parallel, one GPU a slice": Case("1f1b", 2, 1, 2, dp=1, tp=2, options=SEQUENCE[0], real=SEQUENCE[1]),
    "loss parallel, last": Case("1f1b", 2, 1, 2, tp=2, options=LOSS[0], real=LOSS[1]),
}


def of_step(report: Report) -> Counter[tuple[str, int, int]]:
    return Counter((c.collective, c.payload, c.group_size) for c in report.collectives if c.phase == "step")


@pytest.mark.parametrize("name", CASES)
def test_what_clipping_sends(name: str) -> None:
    """And its numbers, where the fused step has nothing beside them."""
    case = CASES[name]
    config, workload = EVEN, SHALLOW
    if case.cp > 1:  # heads so wide that the rank which the oracle runs has the highest peak
        config, workload = EVEN | {"head_dim": 32}, case.workload
    report, real = both(case._replace(workload=workload), config)
    assert of_step(report) == Counter(real.norms)
    assert phases(report) == real_phases(real)
    rest = [c for c in report.collectives if c.phase != "step"]
    plain, unclipped = both(
        case._replace(
            workload=workload,
            options={k: v for k, v in case.options.items() if k != "clip_grad_norm"},
            real={k: v for k, v in case.real.items() if k != "clips"},
        ),
        config,
    )
    assert plain.collectives == rest
    check(plain, unclipped)
    assert plain.phases["step"] < report.phases["step"]


def test_norms_of_two_meshes_are_refused() -> None:
    """transformers' plan leaves the norms of a stage whole: torch stacks no norms of two meshes."""
    case = Case("1f1b", 2, 0, 2, tp=2, options=CLIPS, real={"clips": True}, workload=SHALLOW)
    with pytest.raises(
        memcalc.InputError, match="--clip-grad-norm on: torch's clip_grad_norm_ cannot combine norms of two"
    ):
        memcalc.estimate(EVEN, engine="fsdp2", gpus=8, zero=3, tp=2, pp=2, global_batch_size=4, **CLIPS)
    with pytest.raises(RuntimeError, match="same"):
        both(case._replace(options={}), EVEN)


def test_validate_clips_stages() -> None:
    compared = validate(
        EVEN,
        engine="fsdp2",
        gpus=4,
        pp=2,
        zero=3,
        seq_len=8,
        global_batch_size=4,
        optimizer_implementation="fused",
        **CLIPS,
    )
    rows = compared.memory + compared.communication
    assert [(row.name, row.predicted) for row in rows] == [(row.name, row.measured) for row in rows]
    assert any(row.name == "all_reduce over 2: calls" and row.measured == 2 for row in rows)
