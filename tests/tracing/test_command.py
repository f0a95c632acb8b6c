"""The command line and the documents on a model that has no program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import here, program, write_config
from traces import BART


@pytest.mark.slow
def test_a_folder_with_a_config(tmp_path: Path) -> None:
    write_config(tmp_path, BART)
    ran = program("estimate", "--model", str(tmp_path), "-s", "16", "--json")
    assert (ran.status, ran.stderr) == (0, "")
    document = json.loads(ran.stdout)
    assert document["model"]["model_type"] == "bart"
    by_component: dict[str, set[str]] = {}
    for item in document["memory"]["items"]:
        by_component.setdefault(item["component"], set()).add(item["basis"])
    for component in ("parameters", "gradients", "saved_activations"):
        assert by_component[component] == {"traced"}
    sources = {item["source"] for item in document["memory"]["items"] if item["basis"] == "traced"}
    (source,) = sources
    assert "BartForCausalLM" in source
    assert sum(item["at_peak"] for item in document["memory"]["items"]) == document["memory"]["peak"]


@pytest.mark.parametrize(
    "format", ["csv", *(pytest.param(one, marks=pytest.mark.slow) for one in ("table", "markdown"))]
)
def test_every_format_says_traced(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, BART)
    ran = here(capsys, "estimate", "--model", path, "-s", "16", "--format", format)
    assert (ran.status, ran.stderr) == (0, "")
    assert "traced" in ran.stdout
    assert "traced" not in here(capsys, "estimate", "--model", "gpt2", "--format", format).stdout


def test_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "models", write_config(tmp_path, BART))
    assert ran.status == 0
    assert "BartForCausalLM" in ran.stdout
    assert "model.decoder.layers.*.fc1.weight" in ran.stdout
