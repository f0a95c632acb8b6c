"""Traced types, with a program or without: the estimate against transformers' step on real tensors, to the byte."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import oracle
import pytest
import torch
from traces import BART, BLOOM, DEEPSEEK_V3, GPTJ, MAMBA, ROBERTA, T5, traced

import memcalc

pytestmark = pytest.mark.slow
OTHERS = {"t5": "AutoModelForSeq2SeqLM", "roberta": "AutoModelForMaskedLM"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def check(fields: dict[str, Any], *, precision: str = "bf16", attention: str = "eager", recompute: str = "none",
          micro_batches: int = 1, seq_len: int = 24) -> memcalc.Report:  # fmt: skip
    real = oracle.training_step(
        deepcopy(fields), micro_batch_size=2, seq_len=seq_len, attention=attention, dtype=DTYPES[precision],
        recompute=recompute == "full", optimizer="sgd", micro_batches=micro_batches, real=True,
        auto=OTHERS.get(fields["model_type"], "AutoModelForCausalLM"),
    )  # fmt: skip
    report = memcalc.estimate(
        traced(fields), precision=precision, micro_batch_size=2, seq_len=seq_len, attention=attention, recompute=recompute,
        optimizer="sgd", global_batch_size=2 * micro_batches,
    )  # fmt: skip
    assert report.total("saved_activations") == real.saved
    assert report.phases == {"forward": real.forward, "backward": real.backward, "step": real.step}
    assert sum(item.at_peak for item in report.items) == report.peak
    return report


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("fields", [BLOOM, GPTJ, MAMBA], ids=["bloom", "gptj", "mamba"])
def test_eager_families(fields: dict[str, Any], recompute: str) -> None:
    check(fields, recompute=recompute, seq_len=12)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", [DEEPSEEK_V3, BART], ids=["deepseek_v3", "bart"])
def test_families_with_fused_attention(fields: dict[str, Any], attention: str, recompute: str) -> None:
    check(fields, attention=attention, recompute=recompute)


def test_a_sequence_to_sequence_model() -> None:
    check(T5)


def test_a_masked_model_that_its_architectures_name() -> None:
    report = check(ROBERTA, attention="sdpa")
    assert "RobertaForMaskedLM" in report.traced


def test_gradients_of_an_earlier_micro_batch() -> None:
    check(BLOOM, micro_batches=2)


def test_full_precision() -> None:
    check(GPTJ, precision="fp32", attention="eager")
