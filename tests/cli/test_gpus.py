"""`memcalc gpus`."""

from __future__ import annotations

import json

import pytest
from command import LONG, check_refused, here

from memcalc.inputs.gpu import all_gpus

NAMES = [gpu.name for gpu in all_gpus()]


def test_the_list_has_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "gpus", "--json")
    assert ran.status == 0
    assert ran.stderr == ""
    assert [entry["name"] for entry in json.loads(ran.stdout)] == NAMES


def test_the_table_has_a_line_per_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "gpus")
    assert ran.status == 0
    assert "\x1b" not in ran.stdout
    assert [line.split()[0] for line in ran.stdout.splitlines()[1:]] == NAMES


@pytest.mark.parametrize("name", ["h100-80gb", "H100-SXM", "nvidia h100 80gb hbm3", " h100-80gb "])
def test_one_gpu_by_name_or_alias(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "gpus", name, "--json")
    assert ran.status == 0
    shown = json.loads(ran.stdout)
    assert shown["name"] == "h100-80gb"
    assert shown["memory"]["value"] == 81008
    assert shown["memory"]["source"]


def test_one_gpu_as_a_table_has_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "gpus", "h100-80gb")
    assert ran.status == 0
    assert "81008 MiB" in ran.stdout
    assert "nvidia-smi" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["h1000"], ["h1000", "h100-80gb"]),
        (["h100"], ["h100", "h100-80gb (80 GB)", "h100-94gb (94 GB)"]),
        (["80GB"], ["80GB", "unknown GPU"]),
        (["nosuchgpu"], ["nosuchgpu", "memcalc gpus"]),
        (["--json", "nosuchgpu"], ["nosuchgpu"]),
        ([""], ["''", "unknown GPU"]),
        ([LONG], ["unknown GPU"]),
        (["a\nb\x1b[0m"], ["a b", "unknown GPU"]),
        (["🦙"], ["🦙", "unknown GPU"]),
        (["h100", "a100"], ["a100"]),
        (["--nope"], ["--nope"]),
    ],
)
def test_refused(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, "gpus", *arguments), *words)
