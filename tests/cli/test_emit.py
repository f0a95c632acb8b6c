"""`memcalc emit` and `memcalc plan --emit`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import LLAMA, check_refused, here, write_config


@pytest.fixture
def small(tmp_path: Path) -> str:
    return write_config(tmp_path, LLAMA)


def test_a_file_is_printed_and_what_it_cannot_say(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "emit", "deepspeed", small, "--zero", "2", "--gpus", "4", "-b", "2", "--recompute", "full")
    assert ran.status == 0
    document = json.loads(ran.stdout)
    assert document["zero_optimization"]["stage"] == 2
    assert document["train_micro_batch_size_per_gpu"] == 2
    assert "not in deepspeed: --recompute: " in ran.stderr


def test_what_is_written_is_read_again(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--gpus", "4", "--seq-len", "16")
    path = tmp_path / "ds.json"
    written = here(capsys, "emit", "deepspeed", small, *options, "--zero", "3", "-b", "2", "-o", str(path))
    assert (written.status, written.stdout) == (0, "")
    again = json.loads(here(capsys, "estimate", small, *options, "--deepspeed", str(path), "--json").stdout)
    first = json.loads(here(capsys, "estimate", small, *options, "--zero", "3", "-b", "2", "--json").stdout)
    assert again["setup"] == first["setup"]
    assert again["memory"] == first["memory"]


def test_the_best_plan_is_written(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--gpu", "a100-80gb", "--gpus", "4", "--global-batch-size", "8", "-s", "128", "--jobs", "1")
    ran = here(capsys, "plan", small, *asked, "--engine", "deepspeed", "--emit", "deepspeed")
    assert ran.status == 0
    assert json.loads(ran.stdout)["train_batch_size"] == 8
    assert here(capsys, "plan", small, *asked, "--emit", "torchrun").stdout.endswith("train.py\n")


def test_a_plan_is_not_searched_for_a_format_that_is_none(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memcalc.planning.plan.plan", lambda *_, **__: pytest.fail("searched"))
    check_refused(here(capsys, "plan", small, "--gpu", "t4", "--gpus", "2", "--emit", "yaml"), "emit yaml", "deepspeed")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("json", "gpt2"), ("emit json", "deepspeed")),
        (("", "gpt2"), ("emit ''", "deepspeed")),
        (("deepspeed",), ("--model",)),
        (("deepspeed", "gpt2", "--engine", "fsdp2", "--gpus", "4"), ("--engine", "fsdp2")),
        (("torchtitan", "gpt2", "--engine", "fsdp2", "--gpus", "4"), ("gpt2",)),
    ],
)
def test_what_cannot_be_written_is_refused(
    arguments: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(here(capsys, "emit", *arguments), *words)


def test_a_file_that_cannot_be_written_is_named(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "emit", "torchrun", small, "-o", "/nowhere/run.sh")
    assert ran.status == 2
    assert "--output /nowhere/run.sh: cannot be written" in ran.stderr


FORMATS = {
    "deepspeed": ("--zero", "1"),
    "accelerate": ("--engine", "fsdp2"),
    "training-args": ("--zero", "2"),
    "torchrun": (),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("columns", [40, 200])
def test_every_format_is_written(
    format: str, columns: int, small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is as wide as it is, whatever the terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    ran = here(capsys, "emit", format, small, "--gpus", "4", "-s", "32", *FORMATS[format])
    assert ran.status == 0, ran.stderr
    assert ran.stdout.endswith("\n")
    assert all(line.startswith(f"not in {format}: --") for line in ran.stderr.splitlines())
