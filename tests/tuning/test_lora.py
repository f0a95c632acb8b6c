"""Adapters against peft: names and shapes of weights, and every number of a step on every engine, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from tuning.peft_oracle import adapted
from tuning.tuned_weights import weights_of
from validate.test_fake import LLAMA, MIXTRAL, same
from validated import validate

import memcalc
from memcalc.families import FAMILIES
from memcalc.families.base.linear_modules import linear_modules

DEEP = LLAMA | {"num_hidden_layers": 8}  # so many that paper runs fewer
BIASED = LLAMA | {"attention_bias": True}
FAMILIES_RUN = (
    "qwen2", "mistral", "gemma2", "gpt2", "bert", "t5", "phi3", "bart", "bloom", "opt", "gpt_neox", "phi", "gemma",
    "qwen3", "stablelm", "roberta", "gemma3_text", "olmo2", "starcoder2", "qwen2_moe", "glm4", "cohere", "granite",
    "falcon",
)  # fmt: skip


# --- names, shapes and counts


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "resnet"])
def test_parameters_are_pefts(family: str) -> None:
    """By default, all linear layers, and each linear layer by its name."""
    fields = step_cases(family)[0].fields
    model = memcalc.load_model(fields)
    names = dict.fromkeys(path.rpartition(".")[2] for path, layer in linear_modules(model.program) if layer is not None)
    compared = 0
    for targets in ("default", "all-linear", *names):
        try:
            ours = weights_of(model, lora_rank=3, lora_targets=targets)
        except memcalc.InputError:
            continue
        given = {"default": None, "all-linear": "all-linear"}.get(targets, [targets])
        assert ours == adapted(fields, given), targets
        compared += 1
    assert compared or family == "zamba2"  # whose linear layers are not modelled with adapters


@pytest.mark.parametrize("bias", ["all", "lora_only"])
@pytest.mark.parametrize("family", ["gpt2", "bert", "qwen2", "phi"])
def test_trained_biases(family: str, bias: str) -> None:
    fields = step_cases(family)[0].fields
    model, trained = memcalc.load_model(fields), {"lora_bias": bias, "adapter_dtype": "fp32"}
    ours = weights_of(model, lora_rank=3, lora_targets="all-linear", **trained)
    assert ours == adapted(fields, "all-linear", bias)


def test_trainable_parameters_of_llama_7b() -> None:
    """8 · (4096 + 4096) for q and for v in each of 32 layers: 4.2 million, as peft prints."""
    document = memcalc.estimate("llama-7b", lora_rank=8, precision="bf16").to_dict()
    assert document["model"]["trainable_parameters"] == 32 * 2 * 8 * (4096 + 4096) == 4_194_304


# --- a step


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "bf16", "adapter_dtype": "bf16"},
        {"precision": "bf16-mixed", "lora_targets": "all-linear"},
        {"precision": "bf16-mixed", "lora_targets": "all-linear", "global_batch_size": 6, "recompute": "full"},
        {"precision": "bf16", "recompute": "full"},
        {"precision": "bf16", "recompute": "full", "adapter_dtype": "bf16", "lora_dropout": 0.1},
        {"precision": "bf16", "recompute": "op"},
        {"precision": "fp32", "lora_dropout": 0.1},
        {"precision": "bf16", "lora_dropout": 0.1, "lora_targets": "all-linear"},
        {"precision": "bf16-autocast", "lora_targets": "q_proj,o_proj"},
        {"precision": "bf16", "lora_targets": "lm_head,q_proj"},
        {"precision": "bf16", "lora_targets": "model.layers.1.self_attn.q_proj"},
        {"precision": "bf16", "clip_grad_norm": True, "optimizer_implementation": "for-loop", "global_batch_size": 6},
        {"precision": "fp16-mixed", "optimizer": "adafactor", "adapter_dtype": "fp16"},
        {"precision": "bf16", "input_require_grads": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_one_gpu(options: dict[str, Any]) -> None:
    same(validate(LLAMA, lora_rank=4, micro_batch_size=2, seq_len=32, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed", "lora_bias": "all"},
        {"precision": "bf16", "lora_bias": "lora_only", "adapter_dtype": "bf16"},
        {"precision": "bf16-mixed", "lora_bias": "all", "engine": "deepspeed", "zero": 2, "gpus": 4},
    ],
)
def test_a_step_with_trained_biases(options: dict[str, Any]) -> None:
    same(validate(BIASED, lora_rank=4, micro_batch_size=2, seq_len=32, **options))


@pytest.mark.parametrize("targets", ["default", "all-linear"])
@pytest.mark.parametrize(
    "options",
    [
        {"engine": "ddp", "precision": "bf16"},
        {"engine": "ddp", "precision": "bf16-mixed", "recompute": "full"},
        {"engine": "fsdp2", "zero": 3},
        {"engine": "fsdp2", "zero": 2, "recompute": "full", "global_batch_size": 16},
        {"engine": "fsdp2", "zero": 3, "recompute": "full", "precision": "bf16", "adapter_dtype": "bf16"},
        {"engine": "deepspeed", "zero": 0},
        {"engine": "deepspeed", "zero": 1, "reduce_bucket_size": 2000},
        {"engine": "deepspeed", "zero": 2, "reduce_bucket_size": 2000, "recompute": "full"},
        {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 100},
        {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 10, "recompute": "full"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_engines(targets: str, options: dict[str, Any]) -> None:
    same(validate(DEEP, lora_rank=4, lora_targets=targets, gpus=4, micro_batch_size=2, seq_len=32, **options))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES_RUN)
def test_families(family: str, recompute: str) -> None:
    case = step_cases(family)[0]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "precision": "bf16", "recompute": recompute}
    same(validate(case.fields, lora_rank=3, lora_targets="all-linear", **workload))


@pytest.mark.parametrize(
    "engine", [{}, {"engine": "fsdp2", "zero": 3, "gpus": 4}, {"engine": "deepspeed", "zero": 3, "gpus": 4}]
)
def test_attention_beside_experts(engine: dict[str, Any]) -> None:
    same(validate(MIXTRAL, lora_rank=3, lora_targets="q_proj,v_proj", micro_batch_size=2, seq_len=16, **engine))


def test_what_a_layer_of_llama_keeps() -> None:
    """With fp32 adapters more than full fine-tuning: T(28h + 8ad + 4kd + 10f + 4a + 28r + 8); with 16-bit ones less."""
    h, a, k, d, f, r, tokens = 96, 6, 2, 24, 200, 4, 2 * 32
    setups: list[tuple[dict[str, Any], int]] = [
        ({"lora_rank": r, "lora_targets": "all-linear"}, 28 * h + 8 * a * d + 4 * k * d + 10 * f + 4 * a + 28 * r + 8),
        (
            {"lora_rank": r, "lora_targets": "all-linear", "adapter_dtype": "bf16"},
            12 * h + 4 * a * d + 4 * k * d + 8 * f + 4 * a + 14 * r + 8,
        ),
        ({}, 16 * h + 4 * a * d + 4 * k * d + 8 * f + 4 * a + 8),
    ]
    for options, each in setups:
        kept = [
            memcalc.estimate(
                LLAMA | {"num_hidden_layers": depth}, precision="bf16", micro_batch_size=2, seq_len=32, **options
            ).total("saved_activations")
            for depth in (3, 4)
        ]
        assert kept[1] - kept[0] == tokens * each


# --- what is refused


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        (LLAMA, {"lora_rank": -1}, "--lora-rank -1: allowed: a whole number from 0"),
        (
            LLAMA,
            {"lora_targets": "q_proj"},
            "--lora-targets q_proj: is an option of adapters; allowed: with --lora-rank",
        ),
        (
            LLAMA,
            {"lora_rank": 4, "lora_targets": "query"},
            "--lora-targets query: query is no linear layer of this model",
        ),
        (LLAMA, {"lora_rank": 4, "lora_targets": "embed_tokens"}, "an adapter of an embedding is not modelled"),
        (LLAMA, {"lora_rank": 4, "freeze": "norms"}, "--freeze norms: adapters freeze all of the base"),
        (LLAMA, {"lora_rank": 4, "lora_dropout": 1}, "--lora-dropout 1: allowed: a number from 0 up, below 1"),
        (
            LLAMA,
            {"lora_rank": 4, "lora_targets": "q_proj", "engine": "megatron", "gpus": 2},
            "--lora-targets q_proj: q_proj is no layer of GPTModel that Megatron-Bridge's LoRA adapts",
        ),
        (LLAMA, {"lora_rank": 4, "kernels": "megatron"}, "--kernels megatron: with --lora-rank is not modelled"),
        (LLAMA, {"lora_rank": 4, "adapter_dtype": "bf16", "precision": "fp32"}, "in the base's dtype; allowed: fp32"),
        (LLAMA, {"lora_rank": 4, "adapter_dtype": "fp16", "precision": "bf16"}, "allowed: fp32, bf16"),
        (
            LLAMA,
            {"lora_rank": 4, "engine": "fsdp2", "gpus": 2, "precision": "bf16"},
            "--adapter-dtype fp32: with engine fsdp2",
        ),
        (
            BIASED,
            {"lora_rank": 4, "lora_bias": "all", "precision": "bf16", "optimizer": "sgd"},
            "--adapter-dtype fp32: beside trained biases of bf16 (--lora-bias all) with --optimizer sgd",
        ),
        (
            MIXTRAL,
            {"lora_rank": 4},
            "--lora-targets default: peft loses its default for a mixtral; allowed: all-linear",
        ),
        (step_cases("mamba")[0].fields, {"lora_rank": 4, "lora_targets": "out_proj"}, "out_proj is no linear layer"),
        (
            step_cases("jamba")[0].fields,
            {"lora_rank": 4, "lora_targets": "all-linear"},
            "for a jamba, not all of whose",
        ),
        (
            step_cases("zamba2")[0].fields,
            {"lora_rank": 4, "lora_targets": "q_proj"},
            "for the linear layers of a zamba2 is not modelled",
        ),
        ({"model_type": "albert"}, {"lora_rank": 4}, "--lora-rank 4: for a albert, which is traced, is not modelled"),
    ],
)
def test_refusals(model: dict[str, Any], options: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, **options)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
