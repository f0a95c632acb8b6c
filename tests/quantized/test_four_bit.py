"""4-bit weights against bitsandbytes: what holds a weight, and every number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from quantized.bitsandbytes_oracle import replaced, stored
from validate.test_fake import LLAMA, T5, same
from validated import validate

import memcalc
from memcalc.core.dims import Dim
from memcalc.core.dtypes import bf16
from memcalc.families import FAMILIES
from memcalc.quantized.four_bit import FourBit
from memcalc.quantized.targets import NOT_MODELLED, quantized_places
from memcalc.validate import run

TORCH = {"uint8": "uint8", "fp32": "float32"}
DEEP = LLAMA | {"num_hidden_layers": 8}  # so many that paper runs fewer
QLORA: dict[str, Any] = {"lora_rank": 4, "micro_batch_size": 2, "seq_len": 32, "quantize": "nf4", "precision": "bf16"}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(96, 200), (7, 9), (1, 1), (300, 64)])
def test_what_holds_a_weight(shape: tuple[int, int], kind: str, nested: bool) -> None:
    ours = FourBit(nested, bf16, bf16).stored(tuple(Dim(str(n), n) for n in shape))
    assert [([d.size for d in s.shape], TORCH[s.dtype.name]) for s in ours] == stored(shape, kind, nested=nested)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_MODELLED])
def test_the_layers_that_transformers_quantises(family: str) -> None:
    fields = step_cases(family)[0].fields
    model = memcalc.load_model(fields)
    ours = {
        path if layer is None else path.replace("*", str(layer), 1)
        for path, layer in quantized_places(model.program, family)
    }
    assert ours == set(replaced(fields))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"double_quant": True, "lora_targets": "all-linear"},
        {"quantize": "fp4", "adapter_dtype": "bf16", "lora_targets": "all-linear"},
        {"recompute": "full", "double_quant": True},
        {"recompute": "full", "adapter_dtype": "bf16", "lora_dropout": 0.1, "global_batch_size": 6},
        {"prepare_kbit_training": True, "double_quant": True},
        {"prepare_kbit_training": True, "recompute": "full", "lora_targets": "all-linear", "optimizer": "adamw-8bit"},
        {"precision": "bf16-autocast"},
        {"precision": "bf16-autocast", "lora_targets": "all-linear", "lora_dropout": 0.1, "recompute": "full"},
        {"quantize_compute_dtype": "fp32"},
        {"precision": "bf16-mixed", "double_quant": True},
        {"precision": "fp32", "double_quant": True},
        {"precision": "fp16", "attention": "eager", "quantize_compute_dtype": "fp32"},
        {"lora_targets": "lm_head,q_proj"},
        {"padded": True, "clip_grad_norm": True},
        {"base_dtype": "bf16", "precision": "bf16-autocast", "double_quant": True},
        {"base_dtype": "bf16", "precision": "bf16-autocast", "adapter_dtype": "bf16", "recompute": "full"},
        {
            "base_dtype": "bf16",
            "precision": "bf16-autocast",
            "prepare_kbit_training": True,
            "lora_targets": "all-linear",
        },
        {"base_dtype": "bf16", "precision": "bf16-autocast", "quantize": "none", "lora_targets": "all-linear"},
        {
            "base_dtype": "bf16",
            "precision": "bf16-autocast",
            "quantize": "none",
            "recompute": "full",
            "lora_dropout": 0.1,
        },
        {"engine": "ddp", "gpus": 4},
        {"engine": "ddp", "gpus": 4, "base_dtype": "bf16", "precision": "bf16-autocast"},
        {"engine": "ddp", "gpus": 4, "recompute": "full", "lora_targets": "all-linear", "double_quant": True},
        {"engine": "deepspeed", "gpus": 4, "zero": 0, "precision": "bf16-mixed"},
        {"engine": "deepspeed", "gpus": 4, "zero": 1, "precision": "bf16-mixed", "double_quant": True},
        {"engine": "deepspeed", "gpus": 4, "zero": 2, "precision": "fp16-mixed", "reduce_bucket_size": 2000},
        {
            "engine": "deepspeed",
            "gpus": 4,
            "zero": 2,
            "precision": "bf16-mixed",
            "recompute": "full",
            "lora_dropout": 0.1,
        },
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "nf4",
)
def test_a_step(options: dict[str, Any]) -> None:
    same(validate(DEEP if options.get("gpus") else LLAMA, **QLORA | options))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "family",
    [
        "qwen2", "mistral", "gemma2", "gpt2", "bert", "t5", "phi3", "bart", "bloom", "opt", "gpt_neox", "phi", "gemma",
        "qwen3", "stablelm", "gemma3_text", "olmo2", "starcoder2", "qwen2_moe", "glm4", "cohere", "granite", "gpt_oss",
    ],
)  # fmt: skip
def test_families(family: str, recompute: str) -> None:
    case = step_cases(family)[0]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "recompute": recompute}
    same(validate(case.fields, **QLORA | {"lora_targets": "all-linear", "double_quant": True} | workload))


def test_t5_makes_a_position_bias_in_the_dtype_of_its_queries() -> None:
    """Under autocast a quantised layer returns the dtype of its input, which is fp32 over an fp32 base."""
    options = {"lora_targets": "all-linear", "precision": "bf16-autocast", "recompute": "full"}
    same(run.validate(T5, **QLORA | options))


def test_biases_take_the_dtype_of_the_computation() -> None:
    biased = LLAMA | {"attention_bias": True}
    same(validate(biased, **QLORA | {"precision": "bf16-autocast", "quantize_compute_dtype": "bf16"}))
    same(validate(biased, **QLORA | {"prepare_kbit_training": True}))


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        (LLAMA, {"quantize": "nf5"}, "--quantize nf5: allowed: none, nf4, fp4, int8 (did you mean nf4?)"),
        (LLAMA, {"quantize": "nf4"}, "--quantize nf4: quantised weights do not train; allowed: with --lora-rank"),
        (
            LLAMA,
            {"double_quant": True},
            "--double-quant on: is an option of quantised weights; allowed: with --quantize",
        ),
        (LLAMA, {"quantize_compute_dtype": "bf16"}, "--quantize-compute-dtype bf16: is an option of quantised weights"),
        (LLAMA, {"prepare_kbit_training": True}, "--prepare-kbit-training on: is an option of quantised weights"),
        (
            LLAMA,
            QLORA | {"prepare_kbit_training": True, "precision": "fp32"},
            "--prepare-kbit-training on: casts 16-bit weights",
        ),
        (
            LLAMA,
            QLORA | {"prepare_kbit_training": True, "adapter_dtype": "bf16"},
            "--adapter-dtype bf16: over a base that --prepare-kbit-training",
        ),
        (
            LLAMA,
            {"base_dtype": "fp16", "precision": "bf16"},
            "--base-dtype fp16: with --precision bf16 the base is bf16",
        ),
        (
            LLAMA,
            {"base_dtype": "bf16", "precision": "bf16-autocast"},
            "--base-dtype bf16: for weights that train under",
        ),
        (LLAMA, QLORA | {"recompute": "op"}, "--recompute op: with --quantize nf4 is not modelled"),
        (
            LLAMA,
            QLORA | {"modules_to_save": "q_proj", "lora_targets": "v_proj"},
            "--modules-to-save q_proj: model.layers.*.self_attn.q_proj is quantised, and codes do not train; allowed: emb",
        ),
        (
            step_cases("jamba")[0].fields,
            QLORA | {"lora_targets": "q_proj"},
            "for a jamba, not all of whose linear layers",
        ),
        ({"model_type": "albert"}, QLORA, "--lora-rank 4: for a albert, which is traced"),
    ],
)
def test_refusals(model: dict[str, Any], options: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, **options)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
