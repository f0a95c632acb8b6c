"""8-bit weights against bitsandbytes: what holds a weight, and every number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from quantized.eight_bit_oracle import replaced, stored, validate
from validate.test_fake import GPT2, LLAMA, QWEN3, T5, same

import memcalc
from memcalc.core.dims import Dim
from memcalc.quantized.eight_bit import EightBit
from memcalc.quantized.left_behind import LEFT_BEHIND
from memcalc.quantized.targets import quantized_places

TORCH = {"int8": "int8", "fp32": "float32"}
DEEP = LLAMA | {"num_hidden_layers": 8}  # so many that paper runs fewer
BIASED = LLAMA | {"attention_bias": True}
ODD = LLAMA | {"intermediate_size": 90}
"""cuBLASLt multiplies no int8 whose inner dim is no multiple of 4."""
INT8: dict[str, Any] = {"lora_rank": 4, "micro_batch_size": 2, "seq_len": 32, "quantize": "int8", "precision": "bf16"}


def named(options: dict[str, Any]) -> str:
    return options.get("model_type") or "-".join(map(str, options.values())) or "int8"


@pytest.mark.parametrize("shape", [(96, 200), (7, 9), (1, 1), (300, 64)])
def test_what_holds_a_weight(shape: tuple[int, int]) -> None:
    out, into = Dim("out", shape[0]), Dim("in", shape[1])
    ours = EightBit(out, None).stored((out, into))
    assert [([d.size for d in s.shape], TORCH[s.dtype.name]) for s in ours] == stored(shape)


def test_a_conv1d_has_a_scale_for_each_output() -> None:
    """Its weight is the other way around."""
    report = memcalc.estimate(GPT2, **INT8)
    (scales,) = [row for row in report.items if row.name.endswith("mlp.c_fc.weight.SCB")]
    assert scales.shape[-1] == ("ffn", 4 * GPT2["n_embd"])


def test_the_layers_are_those_of_four_bits() -> None:
    for fields in (LLAMA, GPT2, T5):
        model = memcalc.load_model(fields)
        ours = {path.replace("*", str(layer), 1) for path, layer in quantized_places(model.program, model.model_type)}
        assert ours == set(replaced(fields))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute": "full", "adapter_dtype": "bf16", "lora_dropout": 0.1, "global_batch_size": 6},
        {"prepare_kbit_training": True, "recompute": "full", "lora_targets": "all-linear"},
        {"precision": "bf16-autocast"},
        {"precision": "bf16-autocast", "lora_targets": "all-linear", "lora_dropout": 0.1, "recompute": "full"},
        {"precision": "fp32"},
        {"precision": "fp16", "attention": "eager"},
        {"padded": True, "clip_grad_norm": True, "lora_targets": "lm_head,q_proj"},
        {"base_dtype": "bf16", "precision": "bf16-autocast", "recompute": "full"},
        {
            "base_dtype": "bf16",
            "precision": "bf16-autocast",
            "prepare_kbit_training": True,
            "lora_targets": "all-linear",
        },
        {"dora": True, "lora_targets": "all-linear", "lora_dropout": 0.1},
        {"dora": True, "precision": "bf16-autocast"},
        {"modules_to_save": "lm_head,norm"},
        {"modules_to_save": "embed_tokens", "recompute": "full"},
    ],
    ids=named,
)
def test_a_step(options: dict[str, Any]) -> None:
    same(validate(LLAMA, **INT8 | options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora_targets": "all-linear", "lora_dropout": 0.1},
        {"recompute": "full", "seq_len": 64},
        {"recompute": "full", "recompute_layers": 3},
        {"engine": "ddp", "gpus": 4},
        {"engine": "deepspeed", "gpus": 4, "zero": 2, "precision": "fp16-mixed", "reduce_bucket_size": 2000},
        pytest.param(
            {"engine": "ddp", "gpus": 4, "recompute": "full", "lora_targets": "all-linear"}, marks=pytest.mark.slow
        ),
        pytest.param({"engine": "deepspeed", "gpus": 4, "zero": 0, "precision": "bf16-mixed"}, marks=pytest.mark.slow),
        pytest.param({"engine": "deepspeed", "gpus": 4, "zero": 1, "precision": "bf16-mixed"}, marks=pytest.mark.slow),
        pytest.param(
            {"engine": "deepspeed", "gpus": 4, "zero": 2, "precision": "bf16-mixed", "recompute": "full"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"engine": "deepspeed", "gpus": 2, "zero": 2, "offload_optimizer": "cpu", "precision": "bf16-mixed"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=named,
)
def test_many_layers_and_engines(options: dict[str, Any]) -> None:
    """The inputs that the graph keeps are counted at the real depth, those of the step before too."""
    same(validate(DEEP, **INT8 | options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (BIASED, {"precision": "bf16-autocast"}),
        (BIASED, {"prepare_kbit_training": True}),
        (BIASED, {"lora_bias": "all"}),
        (BIASED, {"lora_bias": "lora_only", "precision": "bf16-autocast", "base_dtype": "bf16"}),
        (GPT2, {"precision": "bf16-autocast"}),
        (GPT2, {"lora_bias": "all", "lora_targets": "all-linear"}),
        (GPT2, {"dora": True}),
    ],
    ids=str,
)
def test_biases_take_the_dtype_of_the_input(model: dict[str, Any], options: dict[str, Any]) -> None:
    same(validate(model, **INT8 | options))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"recompute": "full", "precision": "bf16-autocast"}], ids=named)
def test_widths_that_are_no_multiple_of_four(options: dict[str, Any]) -> None:
    same(validate(ODD, **INT8 | {"lora_targets": "all-linear"} | options))


FAMILIES = (
    "qwen2", "mistral", "gemma2", "bert", "phi3", "bloom", "opt", "gpt_neox", "phi", "xglm", "biogpt", "gemma3_text",
    "starcoder2", "qwen2_moe", "glm4", "cohere", "gpt_oss", "nemotron_h", "lfm2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{}, {"recompute": "full", "precision": "bf16-autocast", "base_dtype": "bf16"}], ids=named
)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, how: dict[str, Any]) -> None:
    if family == "bloom" and how:
        pytest.skip("what it saves differs by 320 B, for which no reason is known")
    case = step_cases(family)[0]
    targets = {"nemotron_h": "in_proj", "gpt_oss": "q_proj", "qwen2_moe": "q_proj"}.get(family, "all-linear")
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "lora_targets": targets}
    same(validate(case.fields, **INT8 | workload | how))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"recompute": "full", "precision": "bf16-autocast"}], ids=named)
@pytest.mark.parametrize("fields", [QWEN3, T5, step_cases("xglm")[0].fields], ids=named)
def test_other_forwards(fields: dict[str, Any], options: dict[str, Any]) -> None:
    same(validate(fields, **INT8 | {"lora_targets": "all-linear", "seq_len": 16} | options))


def test_the_graph_keeps_inputs_that_a_checkpoint_does_not_free() -> None:
    """Of each layer of Llama the inputs of q (which k and v share), o, gate (and up), and down."""
    options: dict[str, Any] = INT8 | {"recompute": "full", "adapter_dtype": "bf16", "micro_batch_size": 1}
    report = memcalc.estimate(DEEP, **options)
    h, heads, ffn = LLAMA["hidden_size"], LLAMA["num_attention_heads"] * LLAMA["head_dim"], LLAMA["intermediate_size"]
    left = [row for row in report.rows_at("forward") if row.name.startswith(LEFT_BEHIND)]
    assert sum(row.nbytes for row in left) == 8 * 2 * 32 * (2 * h + heads + ffn)
    of_four = memcalc.estimate(DEEP, **options | {"quantize": "nf4"})
    assert not any(row.name.startswith(LEFT_BEHIND) for row in of_four.rows_at("forward"))


def test_what_a_report_says() -> None:
    report = memcalc.estimate(LLAMA, **INT8 | {"recompute": "full"}, gpu="h100-sxm")
    notes = report.to_dict()["notes"]
    assert any("llm_int8_threshold" in note for note in notes)
    assert any("as long as the loss is alive" in note and "re-enter" in note for note in notes)
    assert any("int8" in item["dtype"] for item in report.to_dict()["memory"]["items"])


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (LLAMA, {"quantize": "int8"}, "--quantize int8: quantised weights do not train; allowed: with --lora-rank"),
        (LLAMA, INT8 | {"double_quant": True}, "--double-quant on: is an option of 4-bit weights; allowed: with"),
        (
            LLAMA,
            INT8 | {"quantize_compute_dtype": "bf16"},
            "--quantize-compute-dtype bf16: is an option of 4-bit weights; allowed: with --quantize nf4, fp4",
        ),
        (LLAMA, INT8 | {"recompute": "op"}, "--recompute op: with --quantize int8 is not modelled"),
        (LLAMA, INT8 | {"gpus": 2, "zero": 3, "precision": "bf16-mixed"}, "--quantize int8: with ZeRO-3"),
        (LLAMA, INT8 | {"gpus": 2, "engine": "fsdp2", "precision": "bf16-mixed"}, "--quantize int8: with engine fsdp2"),
        (LLAMA, INT8 | {"modules_to_save": "q_proj", "lora_targets": "v_proj"}, "q_proj is quantised, and codes do not"),
        (
            step_cases("deepseek_v3")[0].fields,
            INT8 | {"lora_targets": "o_proj"},
            "kv_b_proj has an input of 4 dims, and bitsandbytes takes 2 or 3; allowed: none, nf4, fp4",
        ),
        (
            step_cases("olmoe")[0].fields,
            INT8 | {"lora_targets": "q_proj"},
            "clip_qkv writes into the result of model.layers.*.self_attn.k_proj",
        ),
    ],
)  # fmt: skip
def test_refusals(model: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, **options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
