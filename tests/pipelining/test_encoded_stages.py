"""Stages of an encoder and a decoder against torch.distributed.pipelining: peaks of all phases and everything sent, byte for
byte, on any rank of a fake process group."""

from __future__ import annotations

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
RECOMPUTED = {"options": {"recompute": "full"}, "real": {"recompute": True}}
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
        "schedule": case.schedule, "optimizer_implementation": "fused",
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
