"""Quantised weights against the modules of transformers and bitsandbytes: every name, shape and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inference.quantised_models import fp8_tensors, int8_tensors, quantised_modules

import memcalc
from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import bf16, fp16, fp32
from memcalc.inference.quantised_formats import Int8
from memcalc.inference.quantised_methods import method_of, method_of_config
from memcalc.inference.weights import Method, weight_rows

TORCH = {
    "fp8": torch.float8_e4m3fn, "fp32": torch.float32, "bf16": torch.bfloat16, "uint8": torch.float8_e8m0fnu,
    "int8": torch.int8,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 48,
    "decoder_sparse_step": 2,
}  # fmt: skip
OPT: dict[str, Any] = {
    "model_type": "opt", "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500,
    "word_embed_proj_dim": 32, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500, "n_positions": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 500, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 72, "first_k_dense_replace": 1, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip


def counted(rows: Any) -> dict[str, list[tuple[tuple[int, ...], str, int]]]:
    out: dict[str, list[tuple[tuple[int, ...], str, int]]] = {}
    for row in rows:
        out.setdefault(row.name, []).append((tuple(d.size for d in row.shape), row.dtype.name, row.copies))
    return out


def of_layers(tensors: dict[str, Any]) -> dict[str, list[tuple[tuple[int, ...], Any, int]]]:
    """The real tensors by name, with * for the layer's number."""
    import re

    out: dict[str, list[tuple[tuple[int, ...], Any, int]]] = {}
    for name, (shape, dtype) in tensors.items():
        known = out.setdefault(re.sub(r"\.(\d+)\.", ".*.", name, count=1), [])
        same = next((i for i, one in enumerate(known) if one[:2] == (shape, dtype)), None)
        if same is None:
            known.append((shape, dtype, 1))
        else:
            known[same] = (shape, dtype, known[same][2] + 1)
    return out


@pytest.mark.parametrize("given", [
    {}, {"weight_block_size": None}, {"weight_block_size": [64, 32]}, {"scale_fmt": "ue8m0"}, {"activation_scheme": "static"},
    {"modules_to_not_convert": ["lm_head", "model.layers.1", "o_proj"]}, {"modules_to_not_convert": ["mlp.gate"]},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("fields", [LLAMA, MIXTRAL, QWEN3_MOE, OPT, DEEPSEEK, GPT2], ids=lambda one: one["model_type"])
def test_fp8_has_the_tensors_of_transformers(fields: dict[str, Any], given: dict[str, Any]) -> None:
    method = method_of_config({"quant_method": "fp8", **given}, fp32)
    ours = counted(weight_rows(memcalc.load_model(fields), fp32, method))
    theirs = of_layers(fp8_tensors(fields, **given))
    named = {name: [(shape, TORCH[dtype], n) for shape, dtype, n in tensors] for name, tensors in ours.items()}
    assert {k: sorted(v, key=str) for k, v in named.items()} == {k: sorted(v, key=str) for k, v in theirs.items()}


@pytest.mark.parametrize("fields", [LLAMA, MIXTRAL, QWEN3_MOE, OPT, DEEPSEEK, GPT2], ids=lambda one: one["model_type"])
@pytest.mark.parametrize("left_out", [None, ["layers.1"], ["fc1", "model.layers.0.self_attn"]], ids=str)
def test_the_layers_of_int8(fields: dict[str, Any], left_out: list[str] | None) -> None:
    pytest.importorskip("bitsandbytes")
    said = {"load_in_8bit": True} if left_out is None else {"load_in_8bit": True, "llm_int8_skip_modules": left_out}
    method = method_of_config(said, bf16)
    from memcalc.inference.quantised_places import linear_places, numbered

    ours = {numbered(place) for place in linear_places(memcalc.load_model(fields), method.rule, method.left_out)}
    assert ours == quantised_modules(fields, left_out)


@pytest.mark.parametrize("out,fan_in", [(24, 40), (7, 3)])
def test_the_tensors_of_int8(out: int, fan_in: int) -> None:
    ours = {
        s.name: (tuple(d.size for d in s.shape), TORCH[s.dtype.name])
        for s in Int8().stored(Dim("o", out), Dim("i", fan_in))
    }
    assert ours == int8_tensors(out, fan_in)


def test_nothing_is_quantised_without_a_method() -> None:
    model = memcalc.load_model(LLAMA)
    assert sum(row.nbytes for row in weight_rows(model, bf16, None)) == 2 * model.num_parameters


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_four_bits_are_those_of_training(kind: str, nested: bool) -> None:
    """The rows of `memcalc.estimate`, which are held to bitsandbytes' own tensors elsewhere."""
    rows = weight_rows(memcalc.load_model(LLAMA), bf16, method_of(kind, bf16, None, double_quant=nested))
    report = memcalc.estimate(memcalc.load_model(LLAMA), quantize=kind, double_quant=nested, lora_rank=4, precision="bf16",
                              adapter_dtype="bf16")  # fmt: skip
    trained = {
        item.name: item.nbytes for item in report.items if item.component == "parameters" and "lora_" not in item.name
    }
    assert {row.name: row.nbytes for row in rows} == {name.replace(".base_layer", ""): n for name, n in trained.items()}


def test_gpt2s_matrices_are_transposed() -> None:
    rows = weight_rows(memcalc.load_model(GPT2), bf16, method_of("int8", bf16, None))
    (scales,) = [row for row in rows if row.name.endswith("c_attn.SCB")]
    assert numel(scales.shape)[0] == 3 * 64


@pytest.mark.parametrize("kind,group,named", [
    ("nonsense", None, "--quantize nonsense"), ("fp8", 128, "--group-size 128"), ("gptq", 48, "--group-size 48"),
    ("gptq", 128, "192 inputs"), ("awq", 128, "192 inputs"),
])  # fmt: skip
def test_what_is_refused(kind: str, group: int | None, named: str) -> None:
    with pytest.raises(memcalc.InputError, match=named):
        weight_rows(memcalc.load_model(LLAMA), fp16, method_of(kind, fp16, group))


@pytest.mark.parametrize("said", [
    {"quant_method": "hqq"}, {"quant_method": "gptq", "bits": 5}, {"quant_method": "awq", "version": "gemv"},
    {"quant_method": "gptq", "bits": "4"}, {"quant_method": "fp8", "weight_block_size": [0, 128]},
    {"quant_method": "compressed-tensors", "config_groups": {}}, {"quant_method": "gptq", "group_size": 0},
    {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
], ids=str)  # fmt: skip
def test_configurations_that_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(memcalc.InputError, match="quantization_config"):
        method_of_config(said, bf16)


def test_a_method_without_the_layers_of_a_model_is_refused() -> None:
    with pytest.raises(memcalc.InputError, match="--quantize fp8"):
        weight_rows(memcalc.load_model("mamba-130m"), bf16, method_of("fp8", bf16, None))


def _bytes(method: Method | None, model: str = "llama-7b") -> float:
    return sum(row.nbytes for row in weight_rows(memcalc.load_model(model), fp16, method)) / 2**30


def test_every_method_is_smaller_than_16_bits() -> None:
    sixteen = _bytes(None)
    for kind in ("fp8", "int8", "nf4", "int4", "gptq", "awq"):
        assert _bytes(method_of(kind, fp16, None)) < 0.56 * sixteen, kind
