"""A pipeline rank's estimate beside the real step: peaks of all phases and everything sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pipeline_oracle import RankStep, pipeline_step
from steps_compared import flops_of

import memcalc
from memcalc.estimation.report import Report
from memcalc.pipelining.programs import spans

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 301, "attention_bias": True,
    "tie_word_embeddings": False,
}  # fmt: skip
WORKLOAD = {"micro_batch_size": 2, "seq_len": 33}
SHALLOW = {"micro_batch_size": 1, "seq_len": 2}
"""So few tokens that reductions set the peak."""


ZERO_2 = {"zero": 2}
KEPT = {"reshards": False}
"""The same of `fully_shard`."""


class Case(NamedTuple):
    """A pipeline's setup, and one of its ranks."""

    schedule: str
    ranks: int
    rank: int
    micro_batches: int
    dp: int = 2
    chunks: int = 1
    options: Mapping[str, Any] = MappingProxyType({})
    """memcalc's."""
    real: Mapping[str, Any] = MappingProxyType({})
    """The oracle's."""
    workload: Mapping[str, Any] = WORKLOAD
    tp: int = 1
    cp: int = 1


def both(case: Case, config: dict[str, Any] = LLAMA) -> tuple[Report, RankStep]:
    of_ranks = spans(config.get("num_hidden_layers", 32), case.ranks, case.chunks)
    theirs = pipeline_step(
        dict(config), schedule=case.schedule, rank=case.rank, micro_batches=case.micro_batches, dp=case.dp,
        tensor_parallel=case.tp, context_parallel=case.cp,
        spans=[[(span.start, span.layers) for span in own] for own in of_ranks],
        **{**case.workload, **case.real},
    )  # fmt: skip
    batch = case.dp * case.micro_batches * case.workload["micro_batch_size"]
    setup: dict[str, Any] = {
        "engine": "fsdp2", "zero": 3, "gpus": case.ranks * case.dp * case.tp * case.cp, "tp": case.tp, "cp": case.cp,
        "pp": case.ranks, "pp_rank": case.rank, "schedule": case.schedule, "virtual_stages": case.chunks,
        "global_batch_size": batch, "optimizer_implementation": "fused",
    }  # fmt: skip
    return memcalc.estimate(dict(config), **{**setup, **case.workload, **case.options}), theirs


def phases(report: Report) -> list[int]:
    return [report.phases[phase] for phase in ("forward", "backward", "step")]


def real_phases(real: RankStep) -> list[int]:
    return [real.forward, max(real.backward, real.reduced), real.step]


def said(report: Report) -> Counter[tuple[str, str, int]]:
    """(axis, collective, bytes of one call) -> calls; the sends of both directions together, tp's and cp's by phase."""
    out: Counter[tuple[str, str, int]] = Counter()
    for c in report.collectives:
        axis = f"{c.axis}, {c.phase}" if c.axis in ("tp", "cp") else c.axis
        out[axis, c.collective, c.payload // c.calls] += c.calls
    return out


def counted(real: RankStep) -> Counter[tuple[str, str, int]]:
    out = Counter(("pp", "send", nbytes) for kind, nbytes in real.moved if kind == "send")
    for axis, sent in (("tp", real.split), ("cp", real.ring)):
        for phase, kind, nbytes in sent:
            out[f"{axis}, forward" if phase == "forward" else f"{axis}, backward", kind, nbytes] += 1
    return out + Counter(("dp", kind, nbytes) for kind, nbytes, _ in real.sent)


def check(report: Report, real: RankStep) -> None:
    assert phases(report) == real_phases(real)
    assert said(report) == counted(real)
    assert flops_of(report) == real.flops
