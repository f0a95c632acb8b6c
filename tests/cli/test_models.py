"""`memcalc models`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import LLAMA, LONG, check_refused, here, write_config

import memcalc
from memcalc.families import FAMILIES
from memcalc.inputs.model import model_names


def test_the_list_has_every_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "models", "--json")
    assert ran.status == 0
    assert ran.stderr == ""
    listed = json.loads(ran.stdout)
    assert [entry["name"] for entry in listed] == model_names()
    assert {entry["model_type"] for entry in listed} <= set(FAMILIES)


def test_the_table_has_a_line_per_model(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "models")
    assert ran.status == 0
    assert [line.split()[0] for line in ran.stdout.splitlines()[1:]] == model_names()
    assert "\x1b" not in ran.stdout


def test_part_of_a_name_and_a_type_narrow_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(here(capsys, "models", "llama", "--type", "llama", "--json").stdout)
    assert listed
    for entry in listed:
        assert "llama" in entry["name"]
        assert entry["model_type"] == "llama"


def test_one_model_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "models", "llama-7b", "--json")
    assert ran.status == 0
    shown = json.loads(ran.stdout)
    assert shown["parameters"] == 6_738_415_616
    assert sum(shown["by_component"].values()) == shown["parameters"]
    total = 0
    for weight in shown["weights"]:
        size = weight["copies"]
        for _, n in weight["shape"]:
            size *= n
        total += size
    assert total == shown["parameters"]


def test_one_model_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "models", "llama-7b")
    assert ran.status == 0
    assert "6,738,415,616" in ran.stdout
    assert "model.layers.*.self_attn.q_proj.weight" in ran.stdout


def test_a_model_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, LLAMA)
    ran = here(capsys, "models", path, "--json")
    assert ran.status == 0
    assert json.loads(ran.stdout)["parameters"] == memcalc.load_model(LLAMA).num_parameters
    check_refused(here(capsys, "models", write_config(tmp_path, {**LLAMA, "vocab_size": 0})), "vocab_size", "0")


def test_brackets_in_a_name_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "[red]mine"
    folder.mkdir()
    write_config(folder, LLAMA)
    assert here(capsys, "models", str(folder)).stdout.startswith("[red]mine ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llama-7c"], ["llama-7c", "llama-7b"]),
        (["nosuchthing"], ["nosuchthing", "memcalc models"]),
        (["--json", "nosuchthing"], ["nosuchthing"]),
        (["--type", "berd"], ["--type", "berd", "llama", "gpt2"]),
        (["--type", "x\ny"], ["--type", "x y", "llama"]),
        (["--type", LONG], ["--type", "llama"]),
        (["--type", ""], ["--type", "llama"]),
        (["gpt2", "--type", "llama"], ["--type", "llama", "gpt2"]),
        (["gpt2", "llama-7b"], ["llama-7b"]),
        ([LONG], ["unknown model"]),
        (["x\0y"], ["unknown model"]),
        (["--nope"], ["--nope"]),
    ],
)
def test_refused(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, "models", *arguments), *words)
