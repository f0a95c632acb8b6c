"""Configurations that say they are quantised and are not, or not as a first reading takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memcalc

OSS = json.loads((Path(__file__).resolve().parents[2] / "model_specs" / "gpt-oss-20b.json").read_text())
CONFIG: dict[str, Any] = {**OSS.get("config", OSS), "num_hidden_layers": 2}
CONFIG.pop("layer_types", None)
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100,
         "num_attention_heads": 4}  # fmt: skip


def weights(config: dict[str, Any], **said: Any) -> int:
    given = {**config, "quantization_config": said} if said else config
    return memcalc.infer(given, prompt_len=8, new_tokens=2).to_dict()["weights"]


def test_mxfp4_is_of_experts_alone() -> None:
    """transformers' replace_with_mxfp4_linear takes GptOssMLP; names to leave out change nothing for attention and the head."""
    left_out = ["self_attn", "mlp.router", "model.embed_tokens", "lm_head"]
    assert weights(CONFIG, quant_method="mxfp4") == weights(
        CONFIG, quant_method="mxfp4", modules_to_not_convert=left_out
    )
    assert weights(LLAMA, quant_method="mxfp4") == weights(LLAMA)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "mxfp4", "dequantize": True}, "dequantize"),
        ({"quant_method": "fp8", "dequantize": True}, "dequantize"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": False}, "load_in_4bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": True}, "load_in_4bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16"),
    ],
)
def test_what_is_not_quantised_is_no_smaller(said: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError, match=rf"quantization_config\.{named}"):
        weights(LLAMA, **said)


def test_a_published_format_that_the_configuration_does_not_say() -> None:
    notes = memcalc.infer(CONFIG, prompt_len=8, new_tokens=2).to_dict()["notes"]
    assert any("published checkpoints of a gpt_oss are in mxfp4" in note for note in notes)
    quantised = {**CONFIG, "quantization_config": {"quant_method": "mxfp4"}}
    assert not any(
        "published" in one for one in memcalc.infer(quantised, prompt_len=8, new_tokens=2).to_dict()["notes"]
    )


def test_more_tokens_than_the_model_was_made_for() -> None:
    long, short = (memcalc.infer("llama-7b", prompt_len=n, new_tokens=1).to_dict()["notes"] for n in (4096, 64))
    assert any("was made for at most 2048 tokens" in note for note in long)
    assert not any("was made for" in note for note in short)


def test_a_network_by_layer_has_no_cache() -> None:
    with pytest.raises(memcalc.InputError, match="does not generate"):
        memcalc.infer(memcalc.load_layers([{"linear": 3}], input=4))
