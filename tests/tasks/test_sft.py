"""SFT against TRL's own trainer and LM head over transformers' models: every number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from tasks.trl_oracle import validate
from validate.test_fake import GPT2, LLAMA, QWEN3, same

import memcalc
from memcalc.errors import InputError
from memcalc.report.notes import notes
from memcalc.report.title import setup_line
from memcalc.tasks.fused_head import WORDS

BF16: dict[str, Any] = {"precision": "bf16"}
LORA: dict[str, Any] = BF16 | {"lora_rank": 4}
NF4: dict[str, Any] = LORA | {"quantize": "nf4"}
LARGE_HEAD = LLAMA | {"vocab_size": 2 * WORDS + 100}
DROPOUTS = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def named(value: Any) -> str:
    return "-".join(map(str, value.values())) if "model_type" not in value else value["model_type"]


def step(model: dict[str, Any], options: dict[str, Any]) -> None:
    same(validate(model, **{"task": "sft", "micro_batch_size": 2, "seq_len": 32} | options))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA, BF16),
        (LLAMA, {"precision": "fp32"}),
        (LLAMA, {"precision": "bf16-mixed", "global_batch_size": 6}),
        (LLAMA, {"precision": "bf16-autocast"}),
        (LLAMA, BF16 | {"recompute": "full"}),
        (LLAMA, BF16 | {"padded": True}),
        (LLAMA, BF16 | {"seq_len": 1200}),
        (LLAMA, BF16 | {"freeze": "embeddings,first:1"}),
        (LLAMA, BF16 | {"freeze": "all-but:head"}),
        (LLAMA, BF16 | {"optimizer": "adamw-8bit"}),
        (LARGE_HEAD, BF16),
        (GPT2, BF16),
        (GPT2 | DROPOUTS, BF16 | {"attention": "eager"}),
        (QWEN3, {"precision": "bf16-mixed", "recompute": "full"}),
    ],
    ids=named,
)
def test_a_step(model: dict[str, Any], options: dict[str, Any]) -> None:
    step(model, options)


@pytest.mark.parametrize(
    "options",
    [
        LORA,
        LORA | {"lora_targets": "all-linear", "lora_dropout": 0.1, "adapter_dtype": "bf16"},
        LORA | {"dora": True, "lora_targets": "all-linear"},
        LORA | {"modules_to_save": "norm"},
        LORA | {"modules_to_save": "lm_head"},
        LORA | {"precision": "bf16-autocast", "base_dtype": "bf16"},
        NF4,
        NF4 | {"double_quant": True, "lora_targets": "all-linear"},
        NF4 | {"recompute": "full"},
        NF4 | {"precision": "bf16-autocast", "base_dtype": "bf16"},
    ],
    ids=named,
)
def test_adapters(options: dict[str, Any]) -> None:
    step(LLAMA, options)


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "ddp", "gpus": 4} | BF16,
        {"engine": "ddp", "gpus": 4} | LORA,
        {"engine": "ddp", "gpus": 2} | NF4,
        {"engine": "deepspeed", "gpus": 4, "zero": 0},
        {"engine": "deepspeed", "gpus": 4, "zero": 1, "precision": "fp16-mixed"},
        {"engine": "deepspeed", "gpus": 4, "zero": 2, "recompute": "full", "global_batch_size": 24},
        {"engine": "deepspeed", "gpus": 4, "zero": 2, "lora_rank": 4},
        {"engine": "deepspeed", "gpus": 2, "zero": 2} | NF4 | {"precision": "bf16-mixed"},
        {"engine": "deepspeed", "gpus": 2, "zero": 2, "offload_optimizer": "cpu"},
    ],
    ids=named,
)
def test_engines(options: dict[str, Any]) -> None:
    step(LLAMA, options)


@pytest.mark.parametrize("family", ["gemma2", "falcon", "opt", "phi", "rwkv", "cohere", "olmo2", "bloom"])
def test_families(family: str) -> None:
    case = step_cases(family)[0]
    same(validate(case.fields, task="sft", micro_batch_size=case.batch, seq_len=case.seq, **BF16))


def test_dropout_stays_on() -> None:
    options: dict[str, Any] = {"task": "sft", "seq_len": 16, "attention": "eager"}
    off, on = (memcalc.estimate(GPT2 | {"resid_pdrop": rate}, **options) for rate in (0.0, 0.5))
    assert on.total("saved_activations") > off.total("saved_activations")


def test_there_are_no_logits() -> None:
    """Of 8192 positions and 128256 words the loss of transformers keeps log-probabilities in fp32. TRL keeps the input of its
    head for the positions that count, and 17 bytes of each."""
    options: dict[str, Any] = BF16 | {"seq_len": 8192, "recompute": "full"}
    eager, sft = (memcalc.estimate("llama-3-8b", task=task, **options) for task in ("pretrain", "sft"))
    assert (
        eager.total("saved_activations") - sft.total("saved_activations") > 4 * 8192 * 128256 - 4096 * 2 * 8192 - 2**20
    )
    assert sft.setup.cross_entropy == "chunked"
    assert sft.model.num_parameters == eager.model.num_parameters
    assert sft.total("parameters") == eager.total("parameters")


def test_it_is_said() -> None:
    report = memcalc.estimate("llama-7b", task="sft", seq_len=64)
    assert " sft " in setup_line(report)
    assert any(note.startswith("sft: all tokens but the first") for note in notes(report))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"precompute_reference": True}, "--precompute-reference on: is an option of tasks with a reference"),
        ({"engine": "fsdp2", "gpus": 4}, "--task sft: with engine fsdp2 is not modelled"),
        ({"zero": 3, "gpus": 4}, "--task sft: with --zero 3"),
        ({"kernels": "fused"}, "--kernels fused: with --task sft"),
        ({"liger": "rope"}, "--liger rope: with --task sft"),
        (NF4 | {"adapter_dtype": "fp32"}, "--adapter-dtype fp32: with --task sft over a quantised base"),
        (
            NF4 | {"precision": "bf16-autocast"},
            "--quantize nf4: with --task sft, whose trainer casts adapters to bf16, over",
        ),
        (NF4 | {"dora": True}, "--dora on: with --task sft over a quantised base"),
        ({"recompute": "op"}, "--recompute op: with --task sft is not modelled"),
        ({"cross_entropy": "eager"}, "TRL's trainer has a head of its own"),
        ({"lora_rank": 4, "lora_targets": "lm_head"}, "lm_head with --task sft"),
    ],
)
def test_what_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError) as refused:
        memcalc.estimate("llama-7b", task="sft", **options)
    assert why in str(refused.value)
