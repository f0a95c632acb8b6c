"""Stages of an encoder and a decoder against torch.distributed.pipelining: peaks of all phases and everything sent, byte for
byte, on any rank of a fake process group."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from encoded_stages_oracle import encoded_step
from stages_compared import counted, phases, real_phases, said
from steps_compared import flops_of

import memcalc
from memcalc.pipelining.encoded import layers_of_stages, stages_of_encoder
from memcalc.report.table import print_report

T5: dict[str, Any] = {
    "model_type": "t5", "d_model": 48, "d_ff": 100, "d_kv": 10, "num_heads": 4, "num_layers": 4, "num_decoder_layers": 3,
    "vocab_size": 301, "dropout_rate": 0.0,
}  # fmt: skip
GATED = T5 | {"feed_forward_proj": "gated-gelu", "num_layers": 2, "num_decoder_layers": 2, "tie_word_embeddings": False}
BART: dict[str, Any] = {
    "model_type": "bart", "d_model": 48, "encoder_layers": 4, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 100, "decoder_ffn_dim": 76, "vocab_size": 301,
    "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
DEEP = T5 | {"num_layers": 9, "num_decoder_layers": 8}
DEEP_BART = BART | {"encoder_layers": 8, "decoder_layers": 9}
WORKLOAD = {"micro_batch_size": 2, "seq_len": 33}
NONE: Mapping[str, Any] = MappingProxyType({})


class Case(NamedTuple):
    """A rank of a pipeline."""

    config: dict[str, Any]
    schedule: str
    rank: int
    encoder: tuple[int, ...]
    decoder: tuple[int, ...]
    micro_batches: int
    dp: int = 2
    options: Mapping[str, Any] = NONE
    """memcalc's."""
    real: Mapping[str, Any] = NONE
    """The oracle's."""
    workload: Mapping[str, Any] = WORKLOAD


ZERO_2 = {"options": {"zero": 2}, "real": {"reshards": False}}
FP32 = {"options": {"precision": "fp32"}, "real": {"policy": None}}
BF16 = {"options": {"precision": "bf16"}, "real": {"policy": None, "dtype": torch.bfloat16}}
EAGER = {"options": {"attention": "eager"}, "real": {"attention": "eager"}}
RECOMPUTED = {"options": {"recompute": "full"}, "real": {"recompute": "full"}}
PER_OP = {"options": {"recompute": "op"}, "real": {"recompute": "op"}}
FP16 = {"options": {"precision": "fp16-mixed"}, "real": {"policy": torch.float16}}
HALVES = ((4,), (3,))
FOUR = ((2, 2), (2, 1))
FEW = {"workload": {"micro_batch_size": 1, "seq_len": 2}}

FAST = {
    "t5, the decoder's first": Case(T5, "1f1b", 2, *FOUR, 4),
    "bart, last": Case(BART, "1f1b", 3, *FOUR, 4, dp=1),
}
SLOW = {
    "t5, first": Case(T5, "1f1b", 0, *FOUR, 4),
    "t5, the encoder's last": Case(T5, "1f1b", 1, *FOUR, 6),
    "t5, last": Case(T5, "1f1b", 3, *FOUR, 4),
    "t5, gpipe, encoder": Case(T5, "gpipe", 0, *HALVES, 3),
    "t5, gpipe, decoder": Case(T5, "gpipe", 1, *HALVES, 5),
    "t5, gpipe, middle": Case(T5, "gpipe", 2, *FOUR, 6, dp=1),
    "t5, three decoders, one in the middle": Case(T5, "1f1b", 2, (4,), (1, 1, 1), 5),
    "t5, many micro-batches, last": Case(T5, "1f1b", 1, *HALVES, 9),
    "t5, many micro-batches, first": Case(T5, "1f1b", 0, *HALVES, 9),
    "t5, zero 2": Case(T5, "1f1b", 2, *FOUR, 4, **ZERO_2),
    "t5, zero 2, few tokens": Case(T5, "gpipe", 1, *HALVES, 2, **ZERO_2, **FEW),
    "t5, fp32": Case(T5, "1f1b", 1, *HALVES, 3, **FP32),
    "t5, bf16": Case(T5, "1f1b", 2, *FOUR, 4, **BF16),
    "t5, eager": Case(T5, "1f1b", 2, *FOUR, 4, **EAGER),
    "t5, few tokens": Case(T5, "1f1b", 3, *FOUR, 4, **FEW),
    "t5, deep, encoder": Case(DEEP, "1f1b", 0, (9,), (8,), 3),
    "t5, deep, decoder": Case(DEEP, "1f1b", 1, (9,), (8,), 3),
    "t5, deep, gpipe": Case(DEEP, "gpipe", 1, (9,), (8,), 5),
    "t5, gated, dp 3": Case(GATED, "1f1b", 1, (2,), (2,), 2, dp=3),
    "t5, recomputed, encoder": Case(T5, "1f1b", 0, *HALVES, 3, **RECOMPUTED),
    "t5, recomputed, decoder": Case(T5, "1f1b", 2, *FOUR, 4, **RECOMPUTED),
    "t5, recomputed per op": Case(T5, "1f1b", 2, *FOUR, 4, **PER_OP),
    "bart, recomputed per op": Case(BART, "1f1b", 1, *FOUR, 4, **PER_OP),
    "t5, fp16": Case(T5, "1f1b", 2, *FOUR, 4, **FP16),
    "bart, first": Case(BART, "1f1b", 0, *FOUR, 4),
    "bart, the encoder's last": Case(BART, "1f1b", 1, *FOUR, 4),
    "bart, the decoder's first": Case(BART, "1f1b", 2, *FOUR, 4),
    "bart, gpipe": Case(BART, "gpipe", 1, *HALVES, 3),
    "bart, zero 2": Case(BART, "1f1b", 3, *FOUR, 5, **ZERO_2),
    "bart, fp32": Case(BART, "1f1b", 2, *FOUR, 4, **FP32),
    "bart, bf16": Case(BART, "1f1b", 1, *HALVES, 3, **BF16),
    "bart, eager": Case(BART, "1f1b", 2, *FOUR, 4, **EAGER),
    "bart, eager, encoder": Case(BART, "1f1b", 1, *FOUR, 4, **EAGER),
    "bart, recomputed": Case(BART, "1f1b", 2, *FOUR, 4, **RECOMPUTED),
    "bart, deep": Case(DEEP_BART, "1f1b", 1, (8,), (9,), 3),
}
CASES = [*(pytest.param(case, id=name) for name, case in FAST.items())]
CASES += [pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()]


def estimated(case: Case) -> Any:
    stages = len(case.encoder) + len(case.decoder)
    setup: dict[str, Any] = {
        "engine": "fsdp2", "zero": 3, "gpus": stages * case.dp, "pp": stages, "pp_rank": case.rank,
        "schedule": case.schedule, "encoder_stages": len(case.encoder), "optimizer_implementation": "fused",
        "global_batch_size": case.dp * case.micro_batches * case.workload["micro_batch_size"],
    }  # fmt: skip
    return memcalc.estimate(dict(case.config), **{**setup, **case.workload, **case.options})


@pytest.mark.parametrize("case", CASES)
def test_step(case: Case) -> None:
    report = estimated(case)
    real, summed = encoded_step(
        dict(case.config), schedule=case.schedule, rank=case.rank, encoder=case.encoder, decoder=case.decoder, dp=case.dp,
        micro_batches=case.micro_batches, **{**case.workload, **case.real},
    )  # fmt: skip
    assert phases(report) == real_phases(real)
    assert said(report) == counted(real) + Counter(("pp", "all_reduce", nbytes) for nbytes, _ in summed)
    groups = [c.group_size for c in report.collectives if c.axis == "pp" and c.collective == "all_reduce"]
    assert groups == [ranks for _, ranks in summed]
    assert flops_of(report) == real.flops


@pytest.mark.parametrize(
    ("encoder", "decoder", "stages", "expected"),
    [
        (24, 24, 4, 2),
        (24, 24, 2, 1),
        (12, 6, 3, 2),
        (6, 12, 3, 1),
        (12, 2, 4, 3),
        (2, 12, 5, 1),
        (1, 1, 2, 1),
        (3, 2, 5, 3),
    ],
)
def test_an_encoder_gets_its_part_of_the_stages(encoder: int, decoder: int, stages: int, expected: int) -> None:
    assert stages_of_encoder(encoder, decoder, stages) == expected
    counts = layers_of_stages(encoder, decoder, stages)
    assert (sum(counts[:expected]), sum(counts[expected:])) == (encoder, decoder)
    assert min(counts) > 0


def test_ranks_hold_the_model_and_the_copies() -> None:
    """All weights once; the table of tokens at three places; a table of relative positions in each stage of a stack."""
    whole = memcalc.load_model(dict(T5))
    held = [
        estimated(Case(T5, "gpipe", rank, *FOUR, 1, dp=1, options={"precision": "fp32"})).to_dict()["memory"][
            "parameters"
        ]
        for rank in range(4)
    ]
    table, positions = 301 * 48, 32 * 4
    assert sum(held) == 4 * (whole.num_parameters + 2 * table + 2 * positions)


REFUSED = {
    "interleaved": (T5, {"schedule": "interleaved", "virtual_stages": 2}, "--schedule interleaved: with engine fsdp2 for a t5"),
    "zbv": (T5, {"schedule": "zbv", "zero": 2}, "allowed: gpipe, 1f1b"),
    "more stages than layers": (T5, {"gpus": 8, "pp": 8, "schedule": "gpipe"}, "--pp 8: t5: 4 layers of the encoder and 3"),
    "an encoder of all stages": (T5, {"encoder_stages": 4}, "--encoder-stages 4: t5: 4 layers of the encoder"),
    "first-stage-layers": (T5, {"first_stage_layers": 1}, "--first-stage-layers 1: with engine fsdp2 for a t5"),
    "tp": (T5, {"gpus": 8, "tp": 2}, "--tp 2: "),
    "adapters": (T5, {"lora_rank": 4}, "--lora-rank 4: with engine fsdp2 for a t5"),
    "frozen": (T5, {"freeze": "embeddings"}, "--freeze embeddings: with engine fsdp2 for a t5"),
    "whisper": ("whisper-small", {"gpus": 8, "tp": 2}, "--tp 2: "),
    "no stages": (T5, {"pp": 1, "encoder_stages": 1, "gpus": 1, "engine": "none", "zero": 0}, "--encoder-stages 1: "),
    "a decoder alone": ("llama-7b", {"encoder_stages": 1}, "--encoder-stages 1: is for the stages of an encoder and a decoder"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model, options, message = REFUSED[name]
    setup: dict[str, Any] = {
        "gpus": 4,
        "pp": 4,
        "zero": 3,
        "engine": "fsdp2",
        "schedule": "gpipe",
        "seq_len": 8,
        **options,
    }
    with pytest.raises(memcalc.InputError) as refused:
        memcalc.estimate(dict(model) if isinstance(model, dict) else model, **setup)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_table_tells_how_unequal_stages_are() -> None:
    file = io.StringIO()
    report = memcalc.estimate(dict(T5), engine="fsdp2", zero=2, gpus=4, pp=4, schedule="gpipe", seq_len=64)
    print_report(report, rows=False, file=file)
    said = " ".join(file.getvalue().split())
    assert "layers of each stage: 2, 2 of the encoder, then 2, 1 of the decoder" in said
    products = [one.flops["total"] for one in report.each_rank()]
    mean = sum(products) / 4
    shares = ", ".join(f"{each / mean:.2f}" for each in products)
    slowest = products.index(max(products))
    assert f"matrix products of each stage, over their mean: {shares}; the others wait for rank {slowest}" in said
