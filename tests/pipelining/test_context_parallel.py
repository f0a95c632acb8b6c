"""Stages under `fully_shard` whose ranks share sequences (torch's `context_parallel` around a schedule's step) against the real
three on every kind of rank: peaks of all phases and everything sent, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import DROPOUTS, step_cases
from pipeline_oracle import RankStep
from stages_compared import KEPT, LLAMA, ZERO_2, Case, both, check, phases, real_phases

import memcalc
from memcalc.engines.fsdp2 import pipeline as fsdp2_pipeline
from memcalc.engines.ranks import ranks
from memcalc.estimation.report import Report
from memcalc.families import supporting
from memcalc.tape.runs import NO_MIDDLE

STAGED = supporting(lambda s: s.stages)

SHARED = supporting(lambda s: s.context_parallel)

GROUPED = LLAMA | {
    "hidden_size": 64,
    "head_dim": 16,
    "vocab_size": 304,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
}
WORKLOAD = {"micro_batch_size": 2, "seq_len": 64}
CHUNK_OF_ONE = {"micro_batch_size": 1, "seq_len": 4}
LATENT = {"micro_batch_size": 1, "seq_len": 128}
"""Whose kernel wants chunks of 32 tokens."""
TWO = Case("1f1b", 2, 0, 2, dp=1, cp=2, workload=WORKLOAD)
RING: tuple[dict[str, Any], dict[str, Any]] = ({"cp_comm_type": "p2p"}, {"rotate": "alltoall"})
RECOMPUTE: tuple[dict[str, Any], dict[str, Any]] = ({"recompute": "full"}, {"recompute": True})
OP: tuple[dict[str, Any], dict[str, Any]] = ({"recompute": "op"}, {"recompute": "op"})
BF16: tuple[dict[str, Any], dict[str, Any]] = ({"precision": "bf16"}, {"policy": None, "dtype": torch.bfloat16})
SEQUENCE: tuple[dict[str, Any], dict[str, Any]] = ({"sequence_parallel": True}, {"plan": "sequence parallel"})


def of(case: Case, *given: tuple[dict[str, Any], dict[str, Any]], **fields: Any) -> Case:
    for options, real in given:
        case = case._replace(options={**case.options, **options}, real={**case.real, **real})
    return case._replace(**fields)


HALVES = of(TWO, (ZERO_2, KEPT), schedule="zero-bubble")
CASES: dict[str, Case] = {
    "1f1b, first": of(TWO, micro_batches=3),
    "1f1b, middle, dp 2": of(TWO, ranks=3, rank=1, micro_batches=4, dp=2),
    "1f1b, last, a ring": of(TWO, RING, rank=1, micro_batches=3),
    "gpipe, last, recompute": of(TWO, RECOMPUTE, schedule="gpipe", rank=1),
    "interleaved, first": of(TWO, schedule="interleaved", micro_batches=4, chunks=2),
    "interleaved, last, recompute": of(TWO, RECOMPUTE, schedule="interleaved", rank=1, chunks=2),
    "zero-bubble, first": of(HALVES, micro_batches=3),
    "zero-bubble, last": of(HALVES, rank=1, micro_batches=3),
    "recompute op": of(TWO, OP, rank=1),
    "bf16, a batch of one": of(TWO, BF16, dp=2, workload={"micro_batch_size": 1, "seq_len": 64}),
    "hybrid": of(TWO, ({"shard_group": 2}, {"replicas": 2}), rank=1, dp=2),
    "micro-batches that are not run on paper, one token a chunk": of(
        TWO, rank=1, micro_batches=8, workload=CHUNK_OF_ONE
    ),
    "zero-bubble, the same": of(HALVES, rank=1, micro_batches=10, workload=CHUNK_OF_ONE),
    "tp 2, first": of(TWO, tp=2),
    "tp 2, last, recompute, a ring": of(TWO, RECOMPUTE, RING, tp=2, rank=1),
    "sequence parallel, first": of(TWO, SEQUENCE, tp=2),
    "sequence parallel, last": of(TWO, SEQUENCE, tp=2, rank=1),
}


def on_rank(number: int, case: Case, config: dict[str, Any]) -> tuple[Report, RankStep]:
    """Paper and trace of one of the ranks that share sequences."""
    report, real = both(of(case, ({}, {"ring_rank": number})), config)
    rank = next(rank for rank in ranks(report.model, report.setup) if rank.cp == number)
    return Report(report.model, report.setup, report.find(rank)), real


@pytest.mark.parametrize("name", CASES)
def test_a_step(name: str) -> None:
    """On the first of two ranks or on the last one, in turn."""
    number, case = list(CASES).index(name) % 2, CASES[name]
    check(*on_rank(number, case, GROUPED | {"num_hidden_layers": 2 * case.chunks + (case.ranks > 2)}))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_each_kind_of_rank(number: int) -> None:
    """With others before it, behind it or both."""
    check(*on_rank(number, of(TWO, RING, RECOMPUTE, rank=1, cp=4), GROUPED))


def config_of(model_type: str) -> dict[str, Any]:
    """A small model of a family, without windows and dropouts."""
    fields = step_cases(model_type)[0].fields
    windows = {"sliding_window": None} if "sliding_window" in fields else {}
    return fields | dict.fromkeys(DROPOUTS, 0.0) | windows | {"num_hidden_layers": 3, "tie_word_embeddings": False}


MANY = [name for name in STAGED if name in SHARED and "layer_types" not in step_cases(name)[0].fields]
FAMILIES = ("qwen3", "phi3", "mixtral", "qwen3_moe", "deepseek_v2", "minimax_m2")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_step_of_another_family(model_type: str) -> None:
    assert model_type in MANY
    case = of(TWO, rank=1, workload=LATENT)
    check(*on_rank(0, case, config_of(model_type)))


def test_the_last_rank_masks_windows_that_are_not_there() -> None:
    """Qwen2-MoE always makes a mask of its windows. Of a weight of one row the last rank has nothing, in any phase."""
    report, real = on_rank(1, of(TWO, workload=LATENT), config_of("qwen2_moe"))
    more = {mine - theirs for mine, theirs in zip(phases(report), real_phases(real), strict=True)}
    assert more == {2 * 64 * 4}  # two layers' gates, of which a shard is padded to one row


def test_the_rank_with_most_is_named() -> None:
    config = GROUPED | {"num_hidden_layers": 2}
    real = {(pp, cp): max(real_phases(on_rank(cp, of(TWO, rank=pp), config)[1])) for pp in (0, 1) for cp in (0, 1)}
    report = memcalc.estimate(
        config,
        engine="fsdp2",
        zero=3,
        gpus=4,
        pp=2,
        cp=2,
        global_batch_size=4,
        optimizer_implementation="fused",
        **WORKLOAD,
    )
    memory = report.to_dict()["memory"]
    assert memory["peak"] == max(real.values()) == real[memory["rank"]["pp"], memory["rank"]["cp"]]
    peaks = [max(real[pp, cp] for cp in (0, 1)) for pp in (0, 1)]
    assert [rank["peak"] for rank in memory["ranks"]] == peaks
    assert sum(item["at_peak"] for item in memory["items"]) == memory["peak"]


DEEP: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"schedule": "1f1b"}),
    ("deepseek_v3", {"schedule": "interleaved", "virtual_stages": 2, "cp_comm_type": "p2p"}),
    ("llama", {"schedule": "zero-bubble", "zero": 2, "tp": 2, "sequence_parallel": True, "gpus": 8}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "options"), DEEP)
def test_what_is_left_out_repeats_what_is_run(
    model_type: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = (GROUPED if model_type == "llama" else config_of(model_type)) | {"num_hidden_layers": 34}
    setup = {"engine": "fsdp2", "zero": 3, "gpus": 4, "pp": 2, "cp": 2, "global_batch_size": 10, **LATENT} | options

    def every_rank() -> list[Any]:
        report = memcalc.estimate(dict(config), **setup)
        reports = [Report(report.model, report.setup, report.find(rank)) for rank in ranks(report.model, report.setup)]
        return [(phases(one), one.collectives) for one in reports]

    few = every_rank()
    monkeypatch.setattr(fsdp2_pipeline, "enough_micro_batches", lambda *given: given[3])
    monkeypatch.setattr(fsdp2_pipeline, "middle_of", lambda _: NO_MIDDLE)
    assert every_rank() == few


def test_stages_send_a_ranks_tokens() -> None:
    def of_one(**options: Any) -> int:
        report = memcalc.estimate("llama-7b", gpus=32, pp=2, zero=3, engine="fsdp2", global_batch_size=32, **options)
        return next(c.payload // c.calls for c in report.collectives if c.axis == "pp")

    assert of_one() == 2 * of_one(cp=2) == 8 * of_one(cp=8) == 8 * of_one(cp=4, tp=2, sequence_parallel=True)


@pytest.mark.parametrize("zero", [2, 3])
def test_states_are_sharded_over_dp_and_cp(zero: int) -> None:
    def states(**options: Any) -> list[int]:
        report = memcalc.estimate(
            "llama-7b",
            gpus=16,
            pp=2,
            pp_rank=0,
            zero=zero,
            engine="fsdp2",
            global_batch_size=16,
            seq_len=4096,
            **options,
        )
        return [report.total(name) for name in ("parameters", "optimizer_states")]

    assert states(cp=8) == states(cp=2) == states()


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        ("llama-7b", {"cp": 4, "seq_len": 4092}, "--seq-len 4092: does not divide into 2·cp = 8 chunks, two for"),
        ("mistral-7b", {"cp": 2}, "--cp 2: with engine fsdp2: mistral-7b has layers with a sliding window"),
        ("llama-7b", {"cp": 2, "padded": True}, "--padded on: with engine fsdp2 and"),
        ("llama-7b", {"cp": 2, "attention": "eager"}, "--attention eager: with engine fsdp2 and cp above 1 torch's"),
        ("gpt-oss-20b", {"cp": 2}, "--cp 2: with engine fsdp2 for a gpt_oss is not modelled"),
        (
            "llama-7b",
            {"cp": 2, "tp": 2, "cross_entropy": "vocab-parallel", "sequence_parallel": True},
            "--cross-entropy vocab-parallel: with engine fsdp2 and cp above 1",
        ),
        ("gpt2", {"cp": 2, "seq_len": 1024}, "--pp 2: with engine fsdp2 for a gpt2 is not modelled"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_by_name(model: Any, options: dict[str, Any], line: str) -> None:
    setup = {"engine": "fsdp2", "zero": 3, "gpus": 16, "pp": 2, "global_batch_size": 16, "seq_len": 4096}
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, **setup | options)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
