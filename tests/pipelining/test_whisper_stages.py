"""Stages of Whisper against torch.distributed.pipelining: peaks of all phases and everything sent, byte for byte, on any rank
of a fake process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from pipelining.whisper_stages_oracle import whisper_step
from stages_compared import counted, phases, real_phases, said
from steps_compared import flops_of

import memcalc

WHISPER: dict[str, Any] = {
    "model_type": "whisper", "d_model": 48, "encoder_layers": 4, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 100, "decoder_ffn_dim": 76, "vocab_size": 301, "num_mel_bins": 20,
    "max_source_positions": 70, "max_target_positions": 64, "pad_token_id": 0, "decoder_start_token_id": 1, "bos_token_id": 1,
    "eos_token_id": 1,
}  # fmt: skip
UNTIED = WHISPER | {"tie_word_embeddings": False}
DEEP = WHISPER | {"encoder_layers": 8, "decoder_layers": 9}
WORKLOAD = {"micro_batch_size": 2, "seq_len": 33}
NONE: Mapping[str, Any] = MappingProxyType({})
HALVES = ((4,), (3,))
FOUR = ((2, 2), (2, 1))
ZERO_2 = {"options": {"zero": 2}, "real": {"reshards": False}}
FP32 = {"options": {"precision": "fp32"}, "real": {"policy": None}}
BF16 = {"options": {"precision": "bf16"}, "real": {"policy": None, "dtype": torch.bfloat16}}
EAGER = {"options": {"attention": "eager"}, "real": {"attention": "eager"}}
RECOMPUTED = {"options": {"recompute": "full"}, "real": {"recompute": "full"}}


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
    real: Mapping[str, Any] = NONE
    workload: Mapping[str, Any] = WORKLOAD


FAST = {"first": Case(WHISPER, "1f1b", 0, *FOUR, 4), "the decoder's first": Case(WHISPER, "1f1b", 2, *FOUR, 4)}
SLOW = {
    "the encoder's last": Case(WHISPER, "1f1b", 1, *FOUR, 6),
    "last": Case(WHISPER, "1f1b", 3, *FOUR, 4, dp=1),
    "a decoder in the middle": Case(WHISPER, "1f1b", 2, (4,), (1, 1, 1), 5),
    "gpipe, encoder": Case(WHISPER, "gpipe", 0, *HALVES, 3),
    "gpipe, decoder": Case(WHISPER, "gpipe", 1, *HALVES, 5),
    "many micro-batches": Case(WHISPER, "1f1b", 0, *HALVES, 9),
    "zero 2, first": Case(WHISPER, "1f1b", 0, *FOUR, 4, **ZERO_2),
    "zero 2, last": Case(WHISPER, "1f1b", 3, *FOUR, 4, **ZERO_2),
    "fp32, first": Case(WHISPER, "1f1b", 0, *HALVES, 3, **FP32),
    "fp32, last": Case(WHISPER, "1f1b", 1, *HALVES, 3, **FP32),
    "bf16": Case(WHISPER, "1f1b", 0, *FOUR, 4, **BF16),
    "eager": Case(WHISPER, "1f1b", 2, *FOUR, 4, **EAGER),
    "recomputed, encoder": Case(WHISPER, "1f1b", 0, *HALVES, 3, **RECOMPUTED),
    "recomputed, decoder": Case(WHISPER, "1f1b", 2, *FOUR, 4, **RECOMPUTED),
    "untied, last": Case(UNTIED, "1f1b", 3, *FOUR, 4),
    "untied, the decoder's first": Case(UNTIED, "1f1b", 2, *FOUR, 4),
    "deep, encoder": Case(DEEP, "1f1b", 0, (8,), (9,), 3),
    "deep, decoder": Case(DEEP, "1f1b", 1, (8,), (9,), 3),
    "few tokens": Case(WHISPER, "1f1b", 3, *FOUR, 4, workload={"micro_batch_size": 1, "seq_len": 2}),
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
    real, summed = whisper_step(
        dict(case.config), schedule=case.schedule, rank=case.rank, encoder=case.encoder, decoder=case.decoder, dp=case.dp,
        micro_batches=case.micro_batches, **{**case.workload, **case.real},
    )  # fmt: skip
    assert phases(report) == real_phases(real)
    assert said(report) == counted(real) + Counter(("pp", "all_reduce", nbytes) for nbytes, _ in summed)
    assert flops_of(report) == real.flops
