"""A base in 4 bits under ZeRO-3, against DeepSpeed's engine over bitsandbytes' and peft's own modules: every number of a
step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from quantized.sharded_oracle import validate
from validate.test_fake import GPT2, LLAMA, same

import memcalc
from memcalc.engines.deepspeed.zero3_codes import KEPT

QLORA: dict[str, Any] = {
    "lora_rank": 4, "quantize": "nf4", "engine": "deepspeed", "zero": 3, "gpus": 4, "micro_batch_size": 2, "seq_len": 32,
    "precision": "bf16-mixed", "param_persistence_threshold": 500, "prefetch_bucket_size": 10_000, "reduce_bucket_size": 5000,
}  # fmt: skip
DEEP = LLAMA | {"num_hidden_layers": 8}  # so many that paper runs fewer
BIASED = LLAMA | {"attention_bias": True}


def named(options: dict[str, Any]) -> str:
    return options.get("model_type") or "-".join(map(str, options.values())) or "plain"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute": "full", "gpus": 3},
        {"param_persistence_threshold": 4000, "double_quant": True, "lora_targets": "all-linear"},
    ],
    ids=named,
)
def test_a_step(options: dict[str, Any]) -> None:
    same(validate(LLAMA, **QLORA | options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute": "full", "gpus": 3},
        {"prefetch_bucket_size": 0, "max_reuse_distance": 0},
        {"global_batch_size": 24},
        {"param_persistence_threshold": 4000, "recompute": "full", "gpus": 3},
        {"param_persistence_threshold": 100_000, "global_batch_size": 24},
        {"precision": "fp16-mixed", "lora_dropout": 0.1, "gpus": 7, "quantize": "fp4"},
        {"precision": "fp32", "double_quant": True},
        {"dora": True, "recompute": "full", "lora_dropout": 0.1},
        {"modules_to_save": "lm_head,norm"},
        {"prepare_kbit_training": True, "padded": True, "clip_grad_norm": True},
        {"optimizer": "lion", "input_require_grads": True},
    ],
    ids=named,
)
def test_deep_models(options: dict[str, Any]) -> None:
    same(validate(DEEP, **QLORA | options))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"lora_bias": "all"}], ids=named)
def test_biases(options: dict[str, Any]) -> None:
    same(validate(BIASED, **QLORA | options))


@pytest.mark.slow
def test_biases_that_train_in_stage_2() -> None:
    options: dict[str, Any] = {"lora_bias": "all", "zero": 2, "reduce_bucket_size": 5000}
    kept = {
        name: value
        for name, value in QLORA.items()
        if name not in ("param_persistence_threshold", "prefetch_bucket_size")
    }
    same(validate(BIASED, **kept | options))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "family",
    ["qwen2", "qwen3", "mistral", "gemma2", "bert", "phi3", "opt", "gpt_neox", "phi", "gemma", "bart", "olmo2"],
)
def test_families(family: str, recompute: str) -> None:
    case = step_cases(family)[0]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "recompute": recompute}
    same(validate(case.fields, **QLORA | {"lora_targets": "all-linear"} | workload))


@pytest.mark.slow
def test_weights_that_are_transposed() -> None:
    same(validate(GPT2, **QLORA))


def test_codes_are_kept_twice() -> None:
    """At the end of forward the graph of the step before still has its codes, and so has this one: of 7B half a byte each."""
    report = memcalc.estimate("llama-7b", gpus=8, zero=3, quantize="nf4", lora_rank=16, recompute="full", seq_len=128)
    codes = 32 * (4 * 4096**2 + 3 * 4096 * 11008) // 2
    first = 3 * 4096**2 // 2  # whose input wants no gradient, but transformers' checkpoints let it
    rows = report.rows_at("forward")
    before = sum(row.nbytes for row in rows if row.name.startswith(KEPT))
    now = sum(row.nbytes for row in rows if row.name.startswith("gathered parameters"))
    assert codes - first <= before <= codes
    assert now >= before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"quantize": "int8"}, "--quantize int8: with ZeRO-3, beside whose shards bitsandbytes keeps the codes whole"),
        (
            {"quantize_storage": "uint8"},
            "--quantize-storage uint8: with ZeRO-3, which gathers two dtypes one by one then, is not",
        ),
        (
            {"quantize_storage": "fp32"},
            "--quantize-storage fp32: DeepSpeed casts every floating-point tensor to bf16, codes too",
        ),
        ({"offload_optimizer": "cpu"}, "--offload-optimizer cpu: with --quantize nf4 and ZeRO-3 is not modelled"),
        (
            {"zero_hpz_partition_size": 2},
            "--zero-hpz-partition-size 2: with --quantize nf4 is not modelled by this version",
        ),
        (
            {"zero_quantized_weights": True},
            "--zero-quantized-weights on: with --quantize nf4 is not modelled by this version",
        ),
        ({"recompute": "op"}, "--recompute op: with --quantize nf4 is not modelled"),
    ],
)
def test_refusals(options: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(LLAMA, **QLORA | options)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
