"""Liger's kernels and the losses that join head and loss, over all weights, frozen ones and adapters: against Liger-Kernel's
own Python, peft's, torch's and DeepSpeed's, every number of a step to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from kernels.liger_oracle import validate
from validate.test_fake import LLAMA, same

import memcalc

WORKLOAD: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 32}
WHOLE: dict[str, Any] = {}
FREEZE: dict[str, Any] = {"freeze": "all-but:last:1+norms"}
LORA: dict[str, Any] = {"lora_rank": 4, "lora_targets": "all-linear"}
FAMILIES = ("gemma2", "mistral", "phi3", "qwen2", "qwen3")


def named(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values())) or "whole"


@pytest.mark.parametrize("tuned", [WHOLE, FREEZE, {"freeze": "head,norms"}, {"freeze": "embeddings"}, LORA], ids=named)
@pytest.mark.parametrize(
    "kernels",
    [
        {"kernels": "fused", "precision": "bf16"},
        {"kernels": "fused", "precision": "bf16", "recompute": "full"},
        {"kernels": "fused", "cross_entropy": "eager", "precision": "bf16"},
        {"kernels": "fused", "precision": "fp32"},
        {"cross_entropy": "fused", "precision": "bf16"},
        {"cross_entropy": "chunked", "precision": "bf16", "recompute": "full"},
        {"cross_entropy": "chunked", "kernels": "fused", "precision": "bf16"},
        {"cross_entropy": "flash", "precision": "bf16"},
        {"cross_entropy": "flash", "kernels": "fused", "precision": "bf16", "recompute": "full"},
        {"cross_entropy": "flash", "precision": "fp32"},
    ],
    ids=named,
)
def test_a_step(kernels: dict[str, Any], tuned: dict[str, Any]) -> None:
    same(validate(LLAMA, **WORKLOAD, **kernels, **tuned))


ZERO_3: list[dict[str, Any]] = [
    {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 100},
    {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 10, "recompute": "full"},
]


@pytest.mark.parametrize("tuned", [WHOLE, FREEZE, {"freeze": "head"}], ids=named)
@pytest.mark.parametrize("engine", ZERO_3, ids=named)
def test_zero_3_gathers_the_head_for_its_loss(engine: dict[str, Any], tuned: dict[str, Any]) -> None:
    """The loss takes the head's weight and does not call the head: to DeepSpeed it is a parameter of the model itself."""
    same(validate(LLAMA, kernels="fused", gpus=4, **WORKLOAD, **engine, **tuned))


@pytest.mark.parametrize("targets", ["default", "q_proj,k_proj,v_proj,o_proj"])
@pytest.mark.parametrize("engine", ZERO_3, ids=named)
def test_adapters_of_attention_on_zero_3(engine: dict[str, Any], targets: str) -> None:
    same(validate(LLAMA, kernels="fused", gpus=4, lora_rank=4, lora_targets=targets, **WORKLOAD, **engine))


@pytest.mark.parametrize("engine", ZERO_3, ids=named)
def test_the_loss_alone_with_adapters_on_zero_3(engine: dict[str, Any]) -> None:
    same(validate(LLAMA, cross_entropy="fused", gpus=4, lora_rank=4, **WORKLOAD, **engine))


@pytest.mark.parametrize("tuned", [WHOLE, FREEZE, LORA], ids=named)
@pytest.mark.parametrize(
    "engine",
    [
        {"engine": "ddp", "precision": "bf16"},
        {"engine": "fsdp2", "zero": 3},
        {"engine": "fsdp2", "zero": 2, "recompute": "full", "global_batch_size": 16},
        {"engine": "deepspeed", "zero": 1, "reduce_bucket_size": 20_000},
        {"engine": "deepspeed", "zero": 2, "reduce_bucket_size": 20_000, "recompute": "full"},
    ],
    ids=named,
)
def test_engines(engine: dict[str, Any], tuned: dict[str, Any]) -> None:
    bf16 = {"adapter_dtype": "bf16"} if tuned is LORA and engine.get("precision") == "bf16" else {}
    same(validate(LLAMA, kernels="fused", gpus=4, **WORKLOAD, **engine, **tuned, **bf16))


@pytest.mark.parametrize("loss", ["chunked", "flash"])
@pytest.mark.parametrize(
    "engine", [{"engine": "ddp"}, {"engine": "fsdp2"}, {"engine": "deepspeed", "zero": 2}], ids=named
)
def test_engines_with_other_losses(engine: dict[str, Any], loss: str) -> None:
    same(validate(LLAMA, cross_entropy=loss, gpus=4, **WORKLOAD, **engine, lora_rank=4))


def test_the_flash_loss_on_zero_3() -> None:
    same(validate(LLAMA, cross_entropy="flash", engine="deepspeed", zero=3, gpus=4, **WORKLOAD, **LORA))


def test_what_the_flash_loss_keeps() -> None:
    """The logits in 16 bits, whose gradient is written over them, where transformers' loss keeps log-probabilities in fp32; the
    logarithm of a sum and the next token of each token, and how many count, for the weight of all."""
    tokens, vocab = 4096, 128256
    options: dict[str, Any] = {"precision": "bf16", "seq_len": tokens}
    eager, flash = (memcalc.estimate("llama-3-8b", **options, cross_entropy=loss) for loss in ("eager", "flash"))
    kept = [report.total("saved_activations") for report in (eager, flash)]
    assert kept[0] - kept[1] == (4 - 2) * tokens * vocab - 4 * tokens + 4 - 8


@pytest.mark.parametrize("tuned", [WHOLE, LORA], ids=named)
@pytest.mark.parametrize("loss", ["fused", "flash"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, loss: str, tuned: dict[str, Any]) -> None:
    case = step_cases(family)[0]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "precision": "bf16"}
    same(validate(case.fields, kernels="fused", cross_entropy=loss, **workload, **tuned))


def test_padded() -> None:
    same(validate(LLAMA, kernels="fused", padded=True, precision="bf16", **WORKLOAD, **LORA))


def test_a_frozen_head_has_no_gradient_in_forward() -> None:
    """Liger's loss makes the head's gradient in forward, unless the head is frozen: 128256·4096 in 16 bits."""
    options: dict[str, Any] = {"kernels": "fused", "precision": "bf16", "recompute": "full"}
    whole, frozen = (memcalc.estimate("llama-3-8b", **options, **more) for more in ({}, {"freeze": "head"}))
    kept = [report.total("saved_activations") for report in (whole, frozen)]
    assert kept[0] - kept[1] == 2 * 128256 * 4096


QUANTISED: dict[str, Any] = {"lora_rank": 4, "quantize": "nf4", "precision": "bf16"}
DORA: dict[str, Any] = {"lora_rank": 4, "dora": True, "precision": "bf16"}
SAVED: dict[str, Any] = {"lora_rank": 4, "modules_to_save": "lm_head,norm", "precision": "bf16"}


@pytest.mark.parametrize("tuned", [QUANTISED, DORA, SAVED, QUANTISED | {"dora": True}], ids=named)
@pytest.mark.parametrize(
    "kernels",
    [
        {"kernels": "fused"},
        {"kernels": "fused", "recompute": "full"},
        {"cross_entropy": "fused"},
        {"cross_entropy": "chunked"},
        {"cross_entropy": "liger"},
        {"cross_entropy": "flash"},
    ],
    ids=named,
)
def test_over_quantised_bases_and_other_adapters(kernels: dict[str, Any], tuned: dict[str, Any]) -> None:
    same(validate(LLAMA, **WORKLOAD, **kernels, **tuned))


@pytest.mark.parametrize("tuned", [QUANTISED, DORA | {"adapter_dtype": "bf16"}], ids=named)
@pytest.mark.parametrize(
    "engine", [{"engine": "ddp"}, {"engine": "deepspeed", "zero": 2, "precision": "bf16-mixed"}], ids=named
)
def test_their_engines(engine: dict[str, Any], tuned: dict[str, Any]) -> None:
    of = {"adapter_dtype": "bf16"} if engine["engine"] == "ddp" else {}
    same(validate(LLAMA, kernels="fused", gpus=4, **WORKLOAD, **tuned | engine | of))


@pytest.mark.parametrize("tuned", [{"dora": True}, {"modules_to_save": "norm"}], ids=named)
@pytest.mark.parametrize("engine", ZERO_3, ids=named)
def test_other_adapters_on_zero_3(engine: dict[str, Any], tuned: dict[str, Any]) -> None:
    same(validate(LLAMA, kernels="fused", gpus=4, lora_rank=4, **tuned, **WORKLOAD, **engine))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"freeze": "all-but:head", "kernels": "fused"}, "--cross-entropy fused: gives the head no gradient"),
        ({"freeze": "all-but:head", "cross_entropy": "chunked"}, "--cross-entropy chunked: with only the head trained"),
        (
            {"lora_rank": 4, "lora_targets": "lm_head", "kernels": "fused"},
            "--cross-entropy fused: takes the weight of lm_head, and its adapter would not train",
        ),
        (
            {"kernels": "fused", "engine": "deepspeed", "zero": 3, "gpus": 2, **LORA},
            "--kernels fused: with adapters in the MLP and ZeRO-3 is not modelled",
        ),
        ({"lora_rank": 4, "kernels": "megatron"}, "--kernels megatron: with --lora-rank is not modelled"),
        (
            {"freeze": "norms", "cross_entropy": "vocab-parallel"},
            "--cross-entropy vocab-parallel: with --freeze is not modelled",
        ),
    ],
)
def test_refusals(options: dict[str, Any], why: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(LLAMA, **options)
    assert why in str(error.value)
