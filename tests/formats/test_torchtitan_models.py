"""The models of torchtitan's flavors have as many parameters as torchtitan's own."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.formats.torchtitan import read
from memcalc.formats.torchtitan_models import NAMES, flavors, titan_model

PARAMETERS = {
    "llama2 7B": 6738415616,
    "llama2 13B": 13015864320,
    "llama2 70B": 68976648192,
    "llama3 debugmodel": 6163712,
    "llama3 8B": 8030261248,
    "llama3 70B": 70553706496,
    "llama3 405B": 405853388800,
    "qwen3 debugmodel": 31987968,
    "qwen3 0.6B": 596049920,
    "qwen3 1.7B": 1720574976,
    "qwen3 4B": 4022468096,
    "qwen3 8B": 8190735360,
    "qwen3 14B": 14768307200,
    "qwen3 32B": 32762123264,
    "qwen3 debugmodel_moe": 315758848,
    "qwen3 30B-A3B": 30532122624,
    "qwen3 235B-A22B": 235093634560,
    "deepseek_v3 debugmodel": 33014016,
    "deepseek_v3 16B": 15706484224,
    "deepseek_v3 236B": 235741434880,
    "deepseek_v3 671B": 671026404352,
}
"""Of torchtitan 0.2.2's modules on the meta device; Llama 2's as its checkpoints have them."""
OF_LLAMA_4 = {
    "debugmodel": (15017216, 256, 3),
    "17bx16e": (107769861120, 5120, 48),
    "17bx128e": (400711848960, 5120, 24),
}
"""The same, the width, and the layers with experts, in each of which the stand-in has a gate of that width."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    model = titan_model(*name.split(), 2048)
    assert model is not None
    loaded = memcalc.load_model(model.config)
    assert loaded.num_parameters == PARAMETERS[name]
    assert loaded.layers == model.layers
    assert loaded.name == name


@pytest.mark.parametrize("flavor", OF_LLAMA_4)
def test_llama_4(flavor: str) -> None:
    parameters, width, layers = OF_LLAMA_4[flavor]
    model = titan_model("llama4", flavor, 8192)
    assert model is not None
    assert memcalc.load_model(model.config).num_parameters == parameters + layers * width
    assert "every expert" in model.stand_in


def test_every_flavor_loads() -> None:
    for name in NAMES:
        for flavor in flavors(name):
            model = titan_model(name, flavor, 200_000)
            assert model is not None
            assert model.config["max_position_embeddings"] >= 200_000
            assert model.experts == ("moe" in memcalc.load_model(model.config).model_type or name == "deepseek_v3")


@pytest.mark.parametrize("end", ["_flex", "_varlen", "_flex_attn", "_varlen_attn", "_irope"])
def test_attention_over_documents(end: str) -> None:
    plain, other = titan_model("llama3", "8B", 2048), titan_model("llama3", f"8B{end}", 2048)
    assert plain is not None and other is not None
    assert (plain.flex, other.flex) == (False, True)
    assert {**plain.config, "_name_or_path": None} == {**other.config, "_name_or_path": None}


def test_unknown_flavors() -> None:
    assert titan_model("llama3", "9B", 2048) is None
    assert titan_model("llama5", "8B", 2048) is None
    assert titan_model("llama3", "", 2048) is None


def test_models_of_ones_own() -> None:
    content = {
        "model": {"name": "mine", "flavor": "1B"},
        "experimental": {"custom_import": "mine"},
        "activation_checkpoint": {"mode": "none"},
    }
    got = read("", content)
    assert got.model is None
    assert "--model has to name it" in got.notes[0]


@pytest.mark.parametrize(
    ("tokenizer", "words"), [("tokenizer.model", 128256), ("test_tiktoken.model", 2256), ("tokenizer", 2048)]
)
def test_vocabulary_of_debug_models(tokenizer: str, words: int) -> None:
    got = read("", {"model": {"tokenizer_path": f"./tests/assets/{tokenizer}"}})
    assert got.model is not None
    assert got.model.value["vocab_size"] == words
