"""DoRA, trained biases and trained modules over a base in 4 bits, against peft's and bitsandbytes' own modules: every number
of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from tuning.peft_step import validate
from validate.test_fake import GPT2, LLAMA, QWEN3, same

import memcalc

QLORA: dict[str, Any] = {"lora_rank": 4, "quantize": "nf4", "precision": "bf16", "micro_batch_size": 2, "seq_len": 32}
EACH: list[dict[str, Any]] = [
    {"dora": True},
    {"dora": True, "lora_targets": "all-linear", "lora_dropout": 0.1},
    {"modules_to_save": "lm_head,norm"},
    {"lora_bias": "all"},
]


def named(options: dict[str, Any]) -> str:
    return options.get("model_type") or "-".join(map(str, options.values()))


@pytest.mark.parametrize(
    "options",
    [
        *EACH,
        {"dora": True, "adapter_dtype": "bf16", "recompute": "full"},
        {"dora": True, "double_quant": True},
        {"dora": True, "precision": "bf16-autocast"},
        {"dora": True, "quantize_compute_dtype": "fp16"},
        {"modules_to_save": "embed_tokens", "prepare_kbit_training": True, "recompute": "full"},
        {"lora_bias": "lora_only"},
    ],
    ids=named,
)
def test_one_gpu(options: dict[str, Any]) -> None:
    same(validate(LLAMA, **QLORA | options))


@pytest.mark.parametrize("options", EACH, ids=named)
@pytest.mark.parametrize(
    "engine",
    [
        {"engine": "ddp", "gpus": 2, "adapter_dtype": "bf16"},
        {"engine": "deepspeed", "gpus": 2, "zero": 0, "precision": "bf16-mixed"},
        {"engine": "deepspeed", "gpus": 2, "zero": 1, "precision": "fp16-mixed"},
        {"engine": "deepspeed", "gpus": 2, "zero": 2, "precision": "bf16-mixed", "recompute": "full"},
    ],
    ids=named,
)
def test_engines(engine: dict[str, Any], options: dict[str, Any]) -> None:
    same(validate(LLAMA, **QLORA | options | engine))


@pytest.mark.parametrize(
    "options", [{"dora": True}, {"dora": True, "lora_dropout": 0.1}, {"lora_bias": "all"}], ids=named
)
@pytest.mark.parametrize(
    "fields",
    [GPT2, QWEN3, *(step_cases(name)[0].fields for name in ("gemma2", "opt", "phi", "t5", "bert", "gpt_neox"))],
    ids=named,
)
def test_families(fields: dict[str, Any], options: dict[str, Any]) -> None:
    same(validate(fields, **QLORA | options))


def test_dora_copies_each_weight_once_more() -> None:
    """The length of a weight's rows needs the weight: of the largest adapted one a copy in 16 bits, cast to the adapters' fp32,
    beside what the product of the thin matrices takes."""
    options: dict[str, Any] = {
        "quantize": "nf4",
        "lora_rank": 16,
        "precision": "bf16",
        "recompute": "full",
        "seq_len": 128,
    }
    plain, dora = (memcalc.estimate("llama-3-8b", **options, dora=on) for on in (False, True))
    assert dora.peak - plain.peak > (2 + 4) * 4096 * 4096
    assert dora.model.trainable_parameters - plain.model.trainable_parameters == 32 * (4096 + 1024)
