"""Packed weights against the tensors that auto-gptq, autoawq and compressed-tensors made (packed_tensors.json)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from inference.packed_by_libraries import MADE

import memcalc
from memcalc.core.dims import Dim
from memcalc.core.dtypes import bf16, fp16
from memcalc.inference.quantised_formats import AWQ, GPTQ, MXFP4, Format
from memcalc.inference.quantised_methods import method_of, method_of_config
from memcalc.inference.weights import _named, served, weight_rows

RECORD: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("packed_tensors.json").read_text())
NAMES = {"int32": "int32", "fp16": "float16", "bf16": "bfloat16", "int64": "int64", "fp8": "float8_e4m3fn", "int8": "int8",
         "fp32": "float32", "uint8": "uint8"}  # fmt: skip


def ours(format: Format, fan_in: int, out: int) -> list[list[Any]]:
    made = format.stored(Dim("out", out), Dim("in", fan_in))
    named = ((_named("m.weight", s.name).removeprefix("m."), s) for s in made)
    return sorted([name, [d.size for d in s.shape], NAMES[s.dtype.name]] for name, s in named)


@pytest.mark.parametrize("library,kind", [("auto-gptq 0.7.1", GPTQ), ("autoawq 0.2.9", AWQ)])
def test_gptq_and_awq(library: str, kind: Any) -> None:
    assert len(RECORD[library]) > 10
    for case in RECORD[library]:
        assert ours(kind(case["bits"], case["group"]), *case["sizes"]) == sorted(case["tensors"]), case


@pytest.mark.parametrize("case", RECORD["compressed-tensors 0.20.0"], ids=lambda one: f"{one['scheme']} {one['sizes']}")
def test_compressed_tensors(case: dict[str, Any]) -> None:
    scheme = {"targets": ["Linear"], "weights": case["scheme"]}
    if case["inputs"]:
        scheme["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    said = {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    assert ours(method_of_config(said, bf16).format, *case["sizes"]) == sorted(case["tensors"])


def test_the_record_is_what_the_libraries_make() -> None:
    """Where they are installed."""
    here = [
        name for name in MADE if importlib.util.find_spec(name.split()[0].replace("-", "_").replace("autoawq", "awq"))
    ]
    if not here:
        pytest.skip("none of auto-gptq, autoawq, compressed-tensors is installed")
    for name in here:
        assert json.loads(json.dumps(list(MADE[name]()))) == RECORD[name]


LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def test_gptq_quantises_every_linear_layer_of_the_stack() -> None:
    rows = {row.name: row for row in weight_rows(memcalc.load_model(LLAMA), fp16, method_of("gptq", fp16, 64))}
    assert rows["model.layers.*.mlp.down_proj.g_idx"].nbytes == 2 * 512 * 4
    assert rows["model.layers.*.self_attn.k_proj.qzeros"].nbytes == 2 * (256 // 64) * (128 // 8) * 4
    assert rows["lm_head.weight"].nbytes == rows["model.embed_tokens.weight"].nbytes == 1000 * 256 * 2
    assert "model.layers.*.mlp.down_proj.weight" not in rows


def test_modules_in_block_to_quantize() -> None:
    said = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "modules_in_block_to_quantize": [["self_attn.q_proj"]],
    }
    rows = weight_rows(memcalc.load_model(LLAMA), fp16, method_of_config(said, fp16))
    assert {r.name.split(".")[-2] for r in rows if r.name.endswith("qweight")} == {"q_proj"}


def test_experts_are_quantised_where_they_are_served() -> None:
    """transformers leaves stacked experts as they are under AWQ; vLLM has a kernel for them."""
    model, method = memcalc.load_model(MIXTRAL), method_of("awq", fp16, 128)
    assert method is not None
    plain = {row.name: row.nbytes for row in weight_rows(model, fp16, method)}
    assert plain["model.layers.*.mlp.experts.gate_up_proj"] == 2 * 4 * 1024 * 256 * 2
    fused = {row.name: row.nbytes for row in weight_rows(model, fp16, served(method))}
    assert fused["model.layers.*.mlp.experts.gate_up_proj_qweight"] == 2 * 4 * 1024 * 256 // 2
    assert fused["model.layers.*.mlp.experts.down_proj_scales"] == 2 * 4 * (512 // 128) * 256 * 2


def test_gpt_oss_in_mxfp4() -> None:
    """The published checkpoint has 13,761,264,768 bytes (`total_size` of model.safetensors.index.json in openai/gpt-oss-20b).
    Its experts' biases are bf16; transformers keeps them in fp32 (Mxfp4GptOssExperts)."""
    method = method_of_config({"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}, bf16)  # fmt: skip
    rows = weight_rows(memcalc.load_model("gpt-oss-20b"), bf16, method)
    biases = sum(row.nbytes for row in rows if row.name.endswith("proj_bias"))
    assert biases == 24 * 32 * (5760 + 2880) * 4
    assert sum(row.nbytes for row in rows) - biases // 2 == 13_761_264_768


def test_mxfp4_needs_blocks_of_32() -> None:
    with pytest.raises(ValueError, match="48 inputs"):
        MXFP4().stored(Dim("o", 8), Dim("i", 48))


def test_a_tensor_parallel_rank_packs_its_own_part() -> None:
    from memcalc.layout.tensor_parallel import split

    model = memcalc.load_model(LLAMA)
    plan = model.support.tensor_parallel
    assert plan is not None
    rank = split(model.program, plan, 2)
    rows = {row.name: row for row in weight_rows(model, fp16, method_of("gptq", fp16, 64), rank)}
    assert [d.size for d in rows["model.layers.*.mlp.down_proj.qweight"].shape] == [256 // 8, 256]
    assert [d.size for d in rows["model.layers.*.mlp.up_proj.qweight"].shape] == [256 // 8, 256]


def test_a_configuration_says_how_its_weights_are_quantised() -> None:
    said = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    model = memcalc.load_model(LLAMA | {"quantization_config": said})
    assert model.quantization == said and memcalc.load_model(LLAMA).quantization is None
    assert model.num_parameters == memcalc.load_model(LLAMA).num_parameters
    tower = memcalc.load_model({"model_type": "llava", "text_config": LLAMA, "quantization_config": said})
    assert tower.quantization == said
