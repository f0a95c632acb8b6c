"""Sizes that came from defaults are named, and only those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import LLAMA, here, write_config

import memcalc
from memcalc.inputs.files import read_bundled, specs_folder
from memcalc.inputs.model import model_names


def test_a_type_alone_says_which_sizes_are_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, {"model_type": "llama"})
    notes = json.loads(here(capsys, "estimate", path, "--json").stdout)["notes"]
    (note,) = (one for one in notes if "leaves out" in one)
    for size in (
        "hidden_size 4096",
        "num_hidden_layers 32",
        "vocab_size 32000",
        "intermediate_size 11008",
        "num_attention_heads 32",
    ):
        assert size in note
    assert "defaults for llama" in note
    assert note in " ".join(here(capsys, "estimate", path).stdout.split())


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "num_attention_heads"]
)
def test_each_size_that_is_left_out_is_named_alone(field: str) -> None:
    config = {name: value for name, value in {**LLAMA, "num_key_value_heads": None}.items() if name != field}
    (note,) = memcalc.load_model(config).notes
    assert note.count(",") == 0
    assert f" {field} " in note


def test_a_table_of_positions_is_a_size_and_a_length_is_none() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
    assert "n_positions 1024" in memcalc.load_model(gpt2).notes[0]
    rotary = {name: value for name, value in LLAMA.items() if name != "max_position_embeddings"}
    assert memcalc.load_model(rotary).notes == ()


def test_another_name_of_a_field_is_that_field() -> None:
    other = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "n_positions": 64}
    assert memcalc.load_model({"model_type": "gpt2", **other}).notes == ()


@pytest.mark.parametrize("name", model_names())
def test_published_files_leave_nothing_out(name: str) -> None:
    """The fields of published configurations, read as a user's."""
    config: dict[str, Any] = read_bundled(specs_folder() / f"{name}.json")["config"]
    assert memcalc.load_model(config).notes == ()
    assert memcalc.load_model(name).notes == ()


def test_a_text_tower_says_it_too() -> None:
    tower = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    (note,) = memcalc.load_model({"model_type": "internvl", "text_config": tower}).notes
    assert "num_hidden_layers" in note


def test_lists_of_sizes_are_named_too() -> None:
    (note,) = memcalc.load_model({"model_type": "resnet"}).notes
    assert "hidden_sizes 256 512 1024 2048" in note and "depths 3 4 6 3" in note


def test_a_type_without_a_program_says_it_where_no_size_is_given() -> None:
    (note,) = memcalc.load_model({"model_type": "distilbert"}).notes
    assert note == "the configuration gives no sizes: all are transformers' defaults for distilbert"
    assert memcalc.load_model({"model_type": "distilbert", "dim": 96, "n_layers": 2}).notes == ()
