"""Modules that train in whole beside adapters, against peft: names and shapes of weights, and every number of a step on every
engine, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from tuning.peft_step import parameters, validate
from tuning.tuned_weights import weights_of
from validate.test_fake import LLAMA, same

import memcalc
from memcalc.families import FAMILIES
from memcalc.families.base.linear_modules import linear_modules

DEEP = LLAMA | {"num_hidden_layers": 8}  # so many that paper runs fewer
TIED = LLAMA | {"tie_word_embeddings": True}
UNMODELLED = (
    "falcon", "opt", "bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "roc_bert", "biogpt", "ctrl", "mamba", "mamba2", "zamba2", "falcon_mamba", "ernie4_5_moe", "dbrx", "modernbert",
    "deberta-v2", "t5", "bart", "whisper",
)  # fmt: skip
BIASED = LLAMA | {"attention_bias": True}


def linear_names(model: memcalc.Model) -> list[str]:
    """The last names of the linear layers within the layers."""
    places = linear_modules(model.program)
    return list(dict.fromkeys(path.rpartition(".")[2] for path, layer in places if layer is not None))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "resnet"])
def test_parameters_are_pefts(family: str) -> None:
    """The table of tokens, the head and both, norms, and a linear layer, beside adapters of another one."""
    fields = step_cases(family)[0].fields
    model = memcalc.load_model(fields)
    program, linear = model.program, linear_names(model)
    norms = dict.fromkeys(weight.name.split(".")[-2] for weight in program.weights() if weight.component == "norm")
    tables, compared = f"{program.embedding},{program.unembedding}", 0
    for name in (*tables.split(","), tables, *list(norms)[:2], *linear[-1:]):
        for targets in linear[:2]:
            try:
                options: dict[str, Any] = {"lora_rank": 3, "lora_targets": targets, "modules_to_save": name}
                ours = weights_of(model, **options)
            except memcalc.InputError:
                continue
            assert ours == parameters(fields, {"target_modules": [targets], "modules_to_save": name.split(",")}), name
            compared += 1
            break
    assert compared or family in UNMODELLED


# --- a step


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16", "adapter_dtype": "bf16", "modules_to_save": "lm_head"},
        {"precision": "bf16-mixed", "modules_to_save": "lm_head,embed_tokens"},
        {
            "precision": "bf16-mixed",
            "modules_to_save": "lm_head,embed_tokens",
            "lora_targets": "all-linear",
            "recompute": "full",
        },
        {"precision": "fp32", "modules_to_save": "embed_tokens", "lora_dropout": 0.1, "global_batch_size": 6},
        {"precision": "bf16-autocast", "modules_to_save": "norm,lm_head"},
        {
            "precision": "bf16-mixed",
            "modules_to_save": "input_layernorm,o_proj",
            "lora_targets": "all-linear",
            "dora": True,
        },
        {"precision": "bf16-mixed", "modules_to_save": "q_proj", "recompute": "full"},
        {"precision": "bf16-mixed", "modules_to_save": "model.layers.1.input_layernorm", "clip_grad_norm": True},
        {
            "precision": "fp16-mixed",
            "modules_to_save": "embed_tokens",
            "optimizer": "adafactor",
            "adapter_dtype": "fp16",
        },
        {"precision": "bf16", "adapter_dtype": "bf16", "modules_to_save": "embed_tokens", "recompute": "op"},
        {"precision": "bf16", "modules_to_save": "lm_head,embed_tokens"},
        {"precision": "bf16", "modules_to_save": "norm,o_proj", "optimizer_implementation": "for-loop"},
        {"precision": "bf16", "modules_to_save": "lm_head", "optimizer_implementation": "fused", "recompute": "full"},
        {"precision": "fp16", "modules_to_save": "embed_tokens", "optimizer": "adam", "global_batch_size": 6},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("model", [LLAMA, TIED], ids=["untied", "tied"])
def test_one_gpu(model: dict[str, Any], options: dict[str, Any]) -> None:
    same(validate(model, lora_rank=4, micro_batch_size=2, seq_len=32, **options))


@pytest.mark.parametrize("saved", ["lm_head,embed_tokens", "norm,o_proj"])
@pytest.mark.parametrize(
    "options",
    [
        {"engine": "ddp", "precision": "bf16-mixed", "adapter_dtype": "bf16"},
        {"engine": "fsdp2", "zero": 3},
        {"engine": "fsdp2", "zero": 2, "recompute": "full", "global_batch_size": 16},
        {"engine": "deepspeed", "zero": 0},
        {"engine": "deepspeed", "zero": 1, "reduce_bucket_size": 2000},
        {"engine": "deepspeed", "zero": 2, "reduce_bucket_size": 2000, "recompute": "full"},
        {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 100},
        {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 10, "recompute": "full"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_engines(saved: str, options: dict[str, Any]) -> None:
    shape = {"gpus": 4, "micro_batch_size": 2, "seq_len": 32}
    same(validate(DEEP, lora_rank=4, modules_to_save=saved, **shape, **options))


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize(
    "options",
    [
        {"engine": "fsdp2", "zero": 3},
        {"engine": "deepspeed", "zero": 2, "reduce_bucket_size": 20_000},
        {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 100, "recompute": "full"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_tied_model_on_engines(saved: str, options: dict[str, Any]) -> None:
    shape = {"gpus": 4, "micro_batch_size": 2, "seq_len": 32}
    same(validate(TIED, lora_rank=4, modules_to_save=saved, **shape, **options))


def test_weights_that_are_released_early() -> None:
    """The module that peft puts around a copy has no weights of its own, and moves nothing that ZeRO-3 gathers or releases."""
    few = {"param_persistence_threshold": 10, "prefetch_bucket_size": 100, "max_live_parameters": 30_000}
    shape = {"gpus": 4, "micro_batch_size": 2, "seq_len": 32, "recompute": "full", "max_reuse_distance": 0}
    same(validate(DEEP, lora_rank=4, modules_to_save="norm,o_proj", engine="deepspeed", zero=3, **shape, **few))


FAMILIES_RUN = (
    "qwen2",
    "qwen3",
    "gpt2",
    "gemma2",
    "phi",
    "gpt_neox",
    "granite",
    "bloom",
    "cohere",
    "falcon_h1",
    "qwen2_moe",
)


@pytest.mark.parametrize("saved", ["the table", "the head", "norms"])
@pytest.mark.parametrize("family", FAMILIES_RUN)
def test_families(family: str, saved: str) -> None:
    case = step_cases(family)[0]
    program = memcalc.load_model(case.fields).program
    norm = next(weight.name.split(".")[-2] for weight in program.weights() if weight.component == "norm")
    name = {"the table": program.embedding, "the head": program.unembedding, "norms": norm}[saved]
    linear = linear_names(memcalc.load_model(case.fields))[0]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "precision": "bf16", "lora_targets": linear}
    same(validate(case.fields, lora_rank=3, modules_to_save=name, **workload))


def test_trained_biases_beside_fp32_adapters() -> None:
    same(validate(BIASED, lora_rank=4, lora_bias="all", precision="bf16", micro_batch_size=2, seq_len=32))


# --- what is refused


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        (LLAMA, {"lora_rank": 0, "modules_to_save": "lm_head"}, "is an option of adapters; allowed: with --lora-rank"),
        (LLAMA, {"modules_to_save": "mlp"}, "--modules-to-save mlp: mlp, a module of several modules, is not modelled"),
        (LLAMA, {"modules_to_save": "score"}, "score is no module of this model; allowed: embed_tokens, lm_head"),
        (LLAMA, {"modules_to_save": "lm_head,"}, "an empty name is no module of this model"),
        (LLAMA, {"modules_to_save": "q_proj,v_proj"}, "leaves no linear layer to have an adapter"),
        (LLAMA, {"modules_to_save": 3}, "--modules-to-save 3: allowed: names of modules with commas"),
        (
            LLAMA,
            {"modules_to_save": "lm_head", "optimizer": "sgd"},
            "--adapter-dtype fp32: beside trained modules of bf16 (--modules-to-save lm_head) with --optimizer sgd",
        ),
        (
            LLAMA,
            {"modules_to_save": "lm_head", "engine": "ddp", "gpus": 2, "precision": "bf16-mixed"},
            "with engine ddp and precision bf16-mixed is not modelled",
        ),
        (step_cases("mixtral")[0].fields, {"lora_targets": "q_proj", "modules_to_save": "experts"}, "experts"),
        (step_cases("bert")[0].fields, {"modules_to_save": "query"}, "for a bert is not modelled"),
        (step_cases("t5")[0].fields, {"modules_to_save": "shared"}, "for a t5 is not modelled"),
    ],
)
def test_refusals(model: dict[str, Any], options: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, **{"lora_rank": 4, "precision": "bf16"} | options)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
