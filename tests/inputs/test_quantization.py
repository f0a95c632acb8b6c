"""Configurations of quantized checkpoints: the model is that of their 16-bit weights, and a note says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils.quantization_config import QuantizationMethod

import memcalc
from memcalc.inputs.quantization import METHODS

SPECS = Path(__file__).resolve().parents[2] / "model_specs"

LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2,
                         "vocab_size": 70, "num_attention_heads": 4}  # fmt: skip

AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "fp8": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "quant_method": "gptq"},
    "awq": {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm", "quant_method": "awq"},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"},
    "compressed-tensors": {"format": "float-quantized", "ignore": ["lm_head"], "quant_method": "compressed-tensors"},
    "mxfp4": {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"},
}


@pytest.mark.parametrize("method", AS_PUBLISHED)
def test_training_starts_from_the_16_bit_weights(method: str) -> None:
    quantized = memcalc.load_model({**LLAMA, "quantization_config": AS_PUBLISHED[method]})
    base = memcalc.load_model(LLAMA)
    assert quantized.weights() == base.weights()
    assert base.notes == ()
    (note,) = quantized.notes
    assert method in note
    assert "16-bit" in note
    report = memcalc.estimate(quantized, seq_len=16)
    assert note in report.to_dict()["notes"]
    assert report.peak == memcalc.estimate(base, seq_len=16).peak


def test_the_base_is_what_transformers_dequantizes_to() -> None:
    """AutoModel.from_config builds the base: quantizers change modules only where weights are loaded."""
    fields = {**LLAMA, "quantization_config": AS_PUBLISHED["fp8"]}
    kept = {name: value for name, value in fields.items() if name != "model_type"}
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **kept))
    ours = [(name, shape) for name, shape, _ in memcalc.load_model(fields).weights()]
    assert ours == [(name, tuple(p.shape)) for name, p in theirs.named_parameters()]


@pytest.mark.parametrize(
    ("name", "also"),
    [
        (
            "deepseek-v3",
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
                "ep_size": 1,
                "moe_layer_freq": 1,
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "torch_dtype": "bfloat16",
                "quantization_config": AS_PUBLISHED["fp8"],
            },
        ),
        ("gpt-oss-20b", {"torch_dtype": "bfloat16", "quantization_config": AS_PUBLISHED["mxfp4"]}),
    ],
)
def test_published_files(name: str, also: dict[str, Any]) -> None:
    fields = json.loads((SPECS / f"{name}.json").read_text(encoding="utf-8"))["config"]
    model = memcalc.load_model({**fields, **also})
    assert model.weights() == memcalc.load_model(name).weights()
    assert len(model.notes) == 1


def test_a_tower_has_the_note_of_the_whole() -> None:
    whole = {"model_type": "llava", "text_config": LLAMA, "quantization_config": AS_PUBLISHED["awq"]}
    (note,) = memcalc.load_model(whole).notes
    assert "awq" in note
    inner = {"model_type": "llava", "text_config": {**LLAMA, "quantization_config": AS_PUBLISHED["awq"]}}
    assert memcalc.load_model(inner).notes == (note,)


def test_a_traced_model_has_it_too() -> None:
    bart = {"model_type": "pegasus", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 50}  # fmt: skip
    quantized = memcalc.load_model({**bart, "quantization_config": AS_PUBLISHED["gptq"]})
    assert quantized.num_parameters == memcalc.load_model(bart).num_parameters
    assert len(quantized.notes) == 1


def test_older_files() -> None:
    """bitsandbytes without a method, and the older name of the field of compressed-tensors."""
    (note,) = memcalc.load_model({**LLAMA, "quantization_config": {"load_in_8bit": True}}).notes
    assert "bitsandbytes" in note
    (note,) = memcalc.load_model({**LLAMA, "compression_config": AS_PUBLISHED["compressed-tensors"]}).notes
    assert "compressed-tensors" in note


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"bits": 4}, "quant_method"),
        ({"quant_method": "bitnet", "linear_class": "autobitlinear"}, "'bitnet'"),
        ({"quant_method": "mine"}, "'mine'"),
        ([4], "an object or null"),
    ],
)
def test_what_is_refused(value: object, words: str) -> None:
    with pytest.raises(memcalc.InputError, match=r"quantization_config") as caught:
        memcalc.load_model({**LLAMA, "quantization_config": value})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_methods_are_transformers_own() -> None:
    known = {method.value for method in QuantizationMethod}
    assert known >= METHODS
    assert known - METHODS == {"bitnet"}


@pytest.mark.parametrize("method", ["modelopt", "intel/auto-round", "GPTQ"])
def test_names_that_other_tools_write(method: str) -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": method}}
    assert method.lower() in memcalc.load_model(config).notes[0]
