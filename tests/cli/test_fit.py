"""`memcalc fit`."""

from __future__ import annotations

import json

import pytest
from command import LONG, check_refused, here, program

from memcalc.decisions.fit import fit

FITS = ("fit", "gpt2", "--solve", "micro-batch-size", "--gpu", "t4", "-s", "1k")
NOTHING = ("fit", "llama-7b", "--solve", "micro-batch-size", "--gpu", "t4")


def test_json_is_what_python_returns(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, *FITS, "--json")
    assert (ran.status, ran.stderr) == (0, "")
    document = json.loads(ran.stdout)
    assert set(document) >= {"solve", "value", "setup", "memory", "fit", "next"}
    assert set(document["next"]) >= {"value", "over_by", "row"}
    assert document == json.loads(json.dumps(fit("micro-batch-size", "gpt2", gpu="t4", seq_len=1024).to_dict()))


@pytest.mark.parametrize("arguments", [FITS, NOTHING])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("json_too", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_check_tells_by_the_status(
    arguments: tuple[str, ...], check: bool, json_too: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = here(capsys, *arguments, *(["--check"] * check), *(["--json"] * json_too))
    assert ran.stderr == ""
    assert ran.status == (1 if check and arguments is NOTHING else 0)
    assert ran.stdout


def test_max_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("fit", "llama-2-70b", "--solve", "gpus", "--zero", "3", "--gpu", "h100-80gb", "--max-gpus", "16")
    assert here(capsys, *arguments, "--check", "--json").status == 1


def test_output_to_a_pipe_is_plain() -> None:
    ran = program(*FITS, TERM="xterm-256color")
    assert (ran.status, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("gpt2 --gpu t4", ("--solve: missing", "micro-batch-size", "memcalc fit llama-7b")),
        ("gpt2 --solve zz --gpu t4", ("--solve zz", "micro-batch-size")),
        ("gpt2 --solve gpus", ("--gpu: missing",)),
        ("--solve gpus --gpu t4", ("--model or --params",)),
        ("gpt2 --solve gpus --gpu t4 -g 8", ("--gpus 8", "leave it out")),
        ("gpt2 --solve seq-len --gpu t4 -s 1k", ("--seq-len 1024", "leave it out")),
        ("gpt2 --solve micro-batch-size --gpu t4 -b 2", ("--micro-batch-size 2", "leave it out")),
        ("gpt2 --solve micro-batch-size --gpu t4 -g 8 --global-batch-size 12", ("--global-batch-size 12",)),
        ("gpt2 --solve params --gpu t4", ("--solve params", "leave --model out")),
        ("--solve params --params 7B --gpu t4", ("--params 7B", "leave it out")),
        ("--solve params --gpu t4 --check", ("--check", "activations")),
        ("--params 7B --solve layers --gpu t4", ("--solve layers", "--model")),
        ("gpt2 --solve layers --gpu t4 --max-gpus 8", ("--max-gpus 8", "--solve gpus")),
        ("gpt2 --solve gpus --gpu t4 --max-gpus 0", ("--max-gpus 0", "65536")),
        ("gpt2 --solve gpus --gpu t4 --max-gpus x", ("x",)),
        ("t5-small --solve layers --gpu t4", ("--solve layers", "two stacks")),
        ("gpt2 --solve seq-len --gpu zz", ("--gpu zz",)),
        (f"gpt2 --solve {LONG} --gpu t4", ("--solve",)),
    ],
)
def test_bad_input_is_one_line(arguments: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, "fit", *arguments.split()), *words)
