"""Adapters whose optimizer is on the host, against DeepSpeed, peft and bitsandbytes: every number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from tuning.peft_step import validate
from validate.test_fake import LLAMA, same

import memcalc
from memcalc.offload.host import totals

OFFLOADED: dict[str, Any] = {
    "engine": "deepspeed", "gpus": 2, "offload_optimizer": "cpu", "lora_rank": 4, "micro_batch_size": 2, "seq_len": 32,
}  # fmt: skip


def named(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 1},
        {"zero": 2},
        {"zero": 2, "recompute": "full", "lora_targets": "all-linear"},
        {"zero": 2, "global_batch_size": 12},
        {"zero": 2, "precision": "fp16-mixed"},
        {"zero": 1, "dora": True},
        {"zero": 2, "modules_to_save": "norm"},
        {"zero": 1, "quantize": "nf4"},
        {"zero": 2, "quantize": "nf4", "double_quant": True, "recompute": "full"},
    ],
    ids=named,
)
def test_a_step(options: dict[str, Any]) -> None:
    same(validate(LLAMA, **OFFLOADED | options))


def test_the_host_has_what_trains_alone() -> None:
    """Of Φ trained weights 18 bytes in all, and less than that again for pinned blocks that are powers of two."""
    report = memcalc.estimate("llama-7b", engine="deepspeed", gpus=8, zero=2, offload_optimizer="cpu", lora_rank=64)
    trained = report.model.trainable_parameters
    assert 18 * trained <= sum(totals(report.host).values()) <= 36 * trained + 2**30
