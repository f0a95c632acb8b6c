"""`memcalc validate`: what it prints, and every bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import check_refused, here, write_config

from memcalc.validate import run

LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                         "vocab_size": 100, "num_attention_heads": 4}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    return str(write_config(tmp_path, LLAMA))


def test_a_table(capsys: pytest.CaptureFixture[str], config: str) -> None:
    ran = here(capsys, "validate", "-m", config, "--precision", "bf16", "-s", "16")
    assert ran.status == 0, ran.stderr
    assert "peak in backward" in ran.stdout
    assert "every row of memory is exact" in ran.stdout


@pytest.mark.slow
def test_one_of_torchruns_ranks_speaks(
    capsys: pytest.CaptureFixture[str], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    for form in ([], ["--json"]):
        assert here(capsys, "validate", "-m", config, "--precision", "bf16", "-s", "16", *form) == (0, "", "")


def test_collectives(capsys: pytest.CaptureFixture[str], config: str) -> None:
    ran = here(
        capsys, "validate", "-m", config, "--engine", "fsdp2", "--zero", "3", "--gpus", "8", "-s", "16", "--json"
    )
    assert ran.status == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert {row["name"]: row["predicted"] for row in document["communication"]} == {
        row["name"]: row["measured"] for row in document["communication"]
    }
    assert any(row["name"].startswith("all_gather over 8") for row in document["communication"])


def test_a_suite(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    suite, record = tmp_path / "suite.json", tmp_path / "record.json"
    suite.write_text(json.dumps({"cases": [{"model": LLAMA, "precision": "bf16", "seq_len": 8}]}))
    ran = here(capsys, "validate", "--suite", str(suite), "--record", str(record))
    assert (ran.status, ran.stdout) == (0, "")
    assert ran.stderr.startswith("1/1 llama")
    assert json.loads(record.read_text())["cases"][0]["outcome"] == "measured"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), "the run failed (RuntimeError: CUDA error"),
        (RuntimeError("CUDA error: out of memory"), "--backend fake: out of memory; allowed: a smaller setup"),
        (KeyError("who knows"), "the run failed (KeyError: 'who knows')"),
    ],
)  # fmt: skip
def test_a_run_that_fails_is_a_line(
    capsys: pytest.CaptureFixture[str], config: str, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(run, "validate", failing)
    check_refused(here(capsys, "validate", "-m", config), words)


@pytest.mark.parametrize("columns", [60, *(pytest.param(n, marks=pytest.mark.slow) for n in (50, 80, 200))])
def test_names_are_not_cut_at_any_width(
    capsys: pytest.CaptureFixture[str], config: str, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    ran = here(capsys, "validate", "-m", config, "--engine", "fsdp2", "--zero", "3", "--gpus", "8", "-s", "16")
    assert max(map(len, ran.stdout.splitlines())) <= columns
    assert "…" not in ran.stdout
    assert ("no room for" in ran.stdout) is (columns < 70)
    for name in ("optimizer_states", "peak in backward"):
        assert (name in ran.stdout) or columns == 50


def test_what_ran_is_said(capsys: pytest.CaptureFixture[str], config: str) -> None:
    options = (
        "--engine",
        "fsdp2",
        "--zero",
        "3",
        "--gpus",
        "4",
        "--pp",
        "2",
        "--pp-rank",
        "1",
        "--global-batch-size",
        "4",
    )
    ran = here(capsys, "validate", "-m", config, "-s", "16", *options)
    title = "fsdp2, ZeRO 3 · pp 2 · bf16-mixed · micro-batch 1 × 16 tokens · backend fake · rank 2 of 4 GPUs"
    assert ran.stdout.splitlines()[0].partition(" · ")[2] == title
    assert ran.stdout.splitlines()[-1].count("transformers") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--model or --suite",)),
        (("-m", "llama-7b", "--suite", "x"), ("--model or --suite",)),
        (("-m", "llama-7b", "--record", "x"), ("--record", "--suite")),
        (("--suite", "x", "--gpus", "8"), ("--gpus", "leave it out")),
        (("-m", "llama-7b", "--backend", "gpu"), ("--backend gpu", "fake, cuda")),
        (("--suite", "/no/such/file"), ("--suite", "no")),
        (("--suite", ""), ("--suite ''", "name of a file")),
        (("--suite", "quick", "--record", "/"), ("--record /", "expected a new file, or the record of a suite")),
        (("--suite", "/"), ("--suite /", "expected a JSON file with a list `cases`")),
        (("--suite", "x", "--record", ""), ("--record ''", "name of a file")),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check_refused(here(capsys, "validate", *arguments), *words)
