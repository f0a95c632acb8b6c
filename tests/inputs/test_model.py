"""`load_model`: where a model may come from, and what it says of its weights."""

from __future__ import annotations

import copy
import json
import os
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from command import LLAMA, write_config

import memcalc
from memcalc.families import FAMILIES
from memcalc.inputs.files import read_bundled, specs_folder
from memcalc.inputs.model import bundled_spec, model_names

NAMES = model_names()


def aliases() -> dict[str, str]:
    return {alias: name for name in NAMES for alias in read_bundled(specs_folder() / f"{name}.json")["aliases"]}


def test_the_names_are_those_that_load() -> None:
    assert len(NAMES) > 80
    for path in specs_folder().glob("*.json"):
        assert (path.stem in NAMES) == (read_bundled(path)["config"]["model_type"] in FAMILIES)
    for name in NAMES:
        assert memcalc.load_model(name).name == name


# --- names


@pytest.mark.parametrize("name", ["llama-7b", "LLaMA-7B", "gpt2", "GPT2", "llama-3.1-8b"])
def test_bundled_names_in_any_case(name: str) -> None:
    assert memcalc.load_model(name).name == name.lower()


def test_every_alias_is_its_model_in_any_case() -> None:
    known = aliases()
    assert known
    for alias, name in known.items():
        for spelled in (alias, alias.lower(), alias.upper()):
            assert memcalc.load_model(spelled).name == name


def test_aliases_are_of_one_model_each() -> None:
    spelled = [alias.lower() for path in specs_folder().glob("*.json") for alias in read_bundled(path)["aliases"]]
    assert len(spelled) == len(set(spelled))
    assert not set(spelled) & set(NAMES)


def test_a_model_is_a_model() -> None:
    model = memcalc.load_model("gpt2")
    assert memcalc.load_model(model) is model


def test_bundled_spec() -> None:
    spec = bundled_spec("LLAMA-7B")
    assert spec is not None
    assert spec["config"]["model_type"] == "llama"
    assert bundled_spec("nosuchmodel") is None


@pytest.mark.parametrize("name", ["../model_specs/llama-7b", "x" * 10_000, "a\0b", "", ".", ".."])
def test_what_is_no_name_has_no_spec(name: str) -> None:
    assert bundled_spec(name) is None


# --- paths


def test_a_path_a_folder_and_a_dict_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    file = write_config(folder, LLAMA)
    expected = memcalc.load_model(LLAMA)
    for source in (file, Path(file), str(folder), folder, str(folder) + "/"):
        model = memcalc.load_model(source)
        assert model.name == "mine"
        assert model.weights() == expected.weights()


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path, LLAMA)
    monkeypatch.chdir(tmp_path)
    for source in ("./config.json", "config.json", ".", Path()):
        assert memcalc.load_model(source).name == tmp_path.name


def test_any_file_name_will_do(tmp_path: Path) -> None:
    assert memcalc.load_model(write_config(tmp_path, LLAMA, "tiny.json")).name == "tiny"


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    path = write_config(tmp_path, b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert memcalc.load_model(path).num_parameters > 0


def test_a_bundled_name_comes_before_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    write_config(tmp_path / "gpt2", LLAMA)
    monkeypatch.chdir(tmp_path)
    assert memcalc.load_model("gpt2").model_type == "gpt2"
    assert memcalc.load_model("./gpt2").model_type == "llama"
    assert memcalc.load_model(Path("gpt2")).model_type == "llama"


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="root may read everything")
def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA)
    tmp_path.chmod(0)
    try:
        with pytest.raises(memcalc.InputError):
            memcalc.load_model(tmp_path)
    finally:
        tmp_path.chmod(0o700)


class BytesPath:
    """A path whose name is bytes, as os.PathLike allows."""

    def __fspath__(self) -> bytes:
        return b"config.json"


@pytest.mark.parametrize("source", [5, None, 1.5, b"gpt2", [], ["gpt2"], True, BytesPath(), object])
def test_what_is_no_source_is_refused(source: Any) -> None:
    with pytest.raises(memcalc.InputError, match="--model"):
        memcalc.load_model(source)


@pytest.mark.parametrize(
    "value", [10**5000, -(10**5000), [10**5000], {"a": 10**5000}], ids=["long", "negative", "list", "dict"]
)
@pytest.mark.parametrize("field", ["hidden_size", "model_type", "hidden_act"])
def test_numbers_too_long_to_print_are_refused(field: str, value: object) -> None:
    """Python refuses to print an integer of more than 4300 digits: with a ValueError of its own."""
    with pytest.raises(memcalc.InputError) as error:
        memcalc.load_model({**LLAMA, field: value})
    assert str(error.value).isprintable()


# --- dicts


def test_the_dict_is_not_modified() -> None:
    given = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}, "unknown": {"nested": [1, 2]}}
    before = copy.deepcopy(given)
    memcalc.estimate(given, gpus=8, zero=2)
    assert given == before


def test_any_mapping_will_do() -> None:
    frozen = memcalc.load_model(MappingProxyType(LLAMA))
    assert frozen.num_parameters == memcalc.load_model(LLAMA).num_parameters


def test_a_later_change_of_the_dict_changes_no_model() -> None:
    given = {**LLAMA}
    model = memcalc.load_model(given)
    before = model.weights()
    given["hidden_size"] = 128
    assert model.weights() == before


def test_a_dict_is_named_by_its_own_words() -> None:
    assert memcalc.load_model(LLAMA).name == "llama"
    assert memcalc.load_model({**LLAMA, "_name_or_path": "owner/name"}).name == "owner/name"


def test_unknown_fields_are_ignored() -> None:
    assert (
        memcalc.load_model({**LLAMA, "torch_dtype": "float16", "x": [None]}).weights()
        == memcalc.load_model(LLAMA).weights()
    )


# --- weights


@pytest.mark.parametrize("name", NAMES)
def test_weights_add_up(name: str) -> None:
    model = memcalc.load_model(name)
    weights = model.weights()
    names = [weight for weight, _, _ in weights]
    assert len(names) == len(set(names))
    assert sum(prod(shape) for _, shape, _ in weights) == model.num_parameters
    assert sum(model.parameters_by_component().values()) == model.num_parameters
    assert 0 < model.active_parameters <= model.num_parameters


def test_the_weights_of_a_small_llama() -> None:
    model = memcalc.load_model({**LLAMA, "num_hidden_layers": 1})
    assert model.weights() == [
        ("model.embed_tokens.weight", (100, 64), None),
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), None),
        ("model.layers.0.self_attn.k_proj.weight", (32, 64), None),
        ("model.layers.0.self_attn.v_proj.weight", (32, 64), None),
        ("model.layers.0.self_attn.o_proj.weight", (64, 64), None),
        ("model.layers.0.mlp.gate_proj.weight", (128, 64), None),
        ("model.layers.0.mlp.up_proj.weight", (128, 64), None),
        ("model.layers.0.mlp.down_proj.weight", (64, 128), None),
        ("model.layers.0.input_layernorm.weight", (64,), None),
        ("model.layers.0.post_attention_layernorm.weight", (64,), None),
        ("model.norm.weight", (64,), None),
        ("lm_head.weight", (100, 64), None),
    ]
    assert model.layers == 1


def test_layers_are_numbered_in_order() -> None:
    model = memcalc.load_model(LLAMA)
    numbers = [int(name.split(".")[2]) for name, _, _ in model.weights() if name.startswith("model.layers.")]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(model.layers))


def test_tied_weights_count_once() -> None:
    untied, tied = (memcalc.load_model({**LLAMA, "tie_word_embeddings": tie}) for tie in (False, True))
    assert untied.num_parameters - tied.num_parameters == 100 * 64
    assert "lm_head.weight" in [name for name, _, _ in untied.weights()]
    assert "lm_head.weight" not in [name for name, _, _ in tied.weights()]


def test_only_routed_experts_are_inactive() -> None:
    dense, routed = memcalc.load_model("mistral-7b"), memcalc.load_model("mixtral-8x7b")
    assert dense.active_parameters == dense.num_parameters
    experts = routed.parameters_by_component()["experts"]
    assert routed.num_parameters - routed.active_parameters == experts - experts * 2 // 8
