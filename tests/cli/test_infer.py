"""`memcalc infer`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import LONG, check_refused, here, program
from crossed import crossed

import memcalc

FITS = ("infer", "gpt2", "--gpu", "t4", "--prompt-len", "256")
TOO_LARGE = ("infer", "llama-2-70b", "--gpu", "t4")


def test_json_is_what_python_returns(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, *FITS, "--batch-size", "3", "--new-tokens", "10", "--json")
    assert (ran.status, ran.stderr) == (0, "")
    report = memcalc.infer("gpt2", gpu="t4", prompt_len=256, batch_size=3, new_tokens=10)
    assert json.loads(ran.stdout) == json.loads(json.dumps(report.to_dict()))


def test_lengths_can_be_in_k(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(
        here(capsys, "infer", "llama-7b", "--prompt-len", "1k", "--new-tokens", "1k", "--json").stdout
    )
    assert (document["setup"]["prompt_len"], document["setup"]["new_tokens"]) == (1024, 1024)


@pytest.mark.parametrize(("arguments", "status"), [(FITS, 0), (TOO_LARGE, 1)])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("json_too", [True, False])
def test_check_tells_by_the_status(
    arguments: tuple[str, ...], status: int, check: bool, json_too: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (["--check"] if check else []) + (["--json"] if json_too else [])
    assert here(capsys, *arguments, *flags).status == (status if check else 0)


@pytest.mark.parametrize(
    ("arguments", "columns"),
    crossed(
        [("llama-7b",), ("jamba-v0.1", "--batch-size", "4"), ("llama-2-70b", "--tp", "8", "--rows")], [60, 100, 120]
    ),
)
def test_no_line_is_wider_than_asked(arguments: tuple[str, ...], columns: int) -> None:
    ran = program("infer", *arguments, COLUMNS=str(columns))
    assert ran.status == 0
    assert max(map(len, ran.stdout.splitlines())) <= columns
    for words in ("weights", "key/value cache", "prefill peak", "decode peak", "rule of thumb: 1.2"):
        assert words in ran.stdout


def test_a_file_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert here(capsys, "infer", "gpt2", "--output", str(file)).status == 0
    assert json.loads(file.read_text())["model"]["name"] == "gpt2"
    check_refused(here(capsys, "infer", "gpt2", "--output", str(tmp_path / "report.csv")), "--output", ".json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ("--model",)),
        ("gpt2 --batch-size 0", ("--batch-size 0",)),
        ("gpt2 --batch-size many", ("--batch-size", "many")),
        ("gpt2 --prompt-len -4", ("--prompt-len -4",)),
        ("gpt2 --prompt-len 4kk", ("--prompt-len", "4kk")),
        ("gpt2 --tp 2", ("--tp 2", "gpt2")),
        ("gpt2 --check", ("--check", "--gpu")),
        ("gpt2 --quantize no-such", ("--quantize", "no-such")),
        ("gpt2 --block-size 16", ("--block-size 16",)),
        ("gpt2 --gpu-memory-utilization 0.9", ("--gpu-memory-utilization 0.9",)),
        ("gpt2 --cache paged", ("--cache", "dynamic")),
        ("modernbert-base", ("modernbert", "does not generate")),
        ("t5-small --cache static", ("--cache static", "t5")),
        ("llama-7b --nonsense", ("--nonsense",)),
        (f"gpt2 --kv-dtype {LONG}", ("--kv-dtype",)),
    ],
)
def test_refusals(arguments: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, "infer", *arguments.split()), *words)


def test_what_is_not_known_to_fit_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "infer", "gpt2", "--gpu", "t4", "--cache", "static", "--check")
    check_refused(ran, "--check", "cannot be shown to fit")


def test_the_format_of_quantised_weights_and_that_not_one_sequence_fits(capsys: pytest.CaptureFixture[str]) -> None:
    shown = here(capsys, *TOO_LARGE, "--quantize", "nf4").stdout
    assert "in bf16, weights in nf4" in shown
    assert "not one such sequence fits" in shown
    assert "weights in" not in here(capsys, *FITS).stdout.splitlines()[0]


def test_the_table_of_dtypes_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = here(capsys, "infer", "llama-3-8b", "--dtype-table").stdout
    assert "…" not in shown
    assert sum("accelerate" in line for line in shown.splitlines()[:4]) == 2
