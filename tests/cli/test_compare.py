"""`memcalc compare`."""

from __future__ import annotations

import json

import pytest
from command import LONG, check_refused, here, program

import memcalc


def test_json_is_what_python_returns(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(
        capsys, "compare", "gpt2", "-s", "512,1k", "--zero", "1,3", "-g", "8", "--gpu", "t4", "--price", "2", "--json"
    )
    assert (ran.status, ran.stderr) == (0, "")
    own = memcalc.compare("gpt2", seq_len=[512, 1024], zero=[1, 3], gpus=8, gpu="t4", price=2)
    document = json.loads(ran.stdout)
    assert set(document) >= {"schema_version", "varied", "columns"}
    assert set(document["columns"][0]) >= {"setup", "memory", "communication", "time", "fit", "error"}
    assert sorted(document["varied"]) == ["seq_len", "zero"]
    columns = {json.dumps(column["values"], sort_keys=True): column for column in document["columns"]}
    for column in own.to_dict()["columns"]:
        assert columns[json.dumps(column["values"], sort_keys=True)] == json.loads(json.dumps(column))


def test_models_and_switches_are_lists_too(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "compare", "gpt2,qwen3-0.6b", "--padded", "on,off", "--json")
    document = json.loads(ran.stdout)
    assert len(document["columns"]) == 4
    assert {column["setup"]["padded"] for column in document["columns"]} == {True, False}
    assert {column["model"]["name"] for column in document["columns"]} == {"gpt2", "qwen3-0.6b"}
    bare = json.loads(here(capsys, "compare", "gpt2", "-b", "1,2", "--padded", "--json").stdout)
    assert all(column["setup"]["padded"] for column in bare["columns"])


def test_a_table_in_a_pipe_is_plain_and_has_bars_only_if_asked() -> None:
    arguments = ("compare", "llama-7b", "-g", "8", "--zero", "1,3", "--gpu", "a100-80gb")
    ran = program(*arguments, "--bars", TERM="xterm-256color", PYTHONUTF8="1")
    assert (ran.status, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout
    assert "where the time of a step goes" in ran.stdout
    assert "cost" not in ran.stdout.split("*")[0]
    assert "where the time" not in program(*arguments).stdout


def test_an_encoding_without_bars_is_no_failure() -> None:
    ran = program("compare", "gpt2", "-s", "64,128", "--bars", PYTHONIOENCODING="ascii")
    assert (ran.status, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ("--model or --params", "memcalc compare llama-7b --gpus 8 --zero 1,2,3")),
        ("gpt2", ("no option has several values", "memcalc compare llama-7b --gpus 8 --zero 1,2,3")),
        ("gpt2 -m llama-7b -g 8,16", ("--model llama-7b", "contradicts")),
        ("gpt2 --params 7B -g 8,16", ("--model or --params",)),
        ("gpt2 -g 8,", ("--gpus 8,", "a value is empty")),
        ("gpt2 -g 8,zz", ("--gpus zz", "a whole number")),
        ("gpt2,zz -g 8", ("--model zz", "unknown model")),
        ("gpt2 -g 1,2,3,4,5,6,7,8,9 -b 1,2,3,4,5,6,7,8", ("= 72 combinations", "at most 64")),
        ("gpt2 -g 8,16 --tp 3", ("every combination is refused", "--gpus 8")),
        ("gpt2 -g 8,16 --price 2", ("--price", "--gpu")),
        ("gpt2 -g 8,16 --gpu t4 --price x", ("--price x", "a number above 0")),
        ("gpt2 -g 8,16 --padded=perhaps", ("--padded perhaps",)),
        ("gpt2 -g 8,16 --nothing 3", ("--nothing",)),
        (f"gpt2 -g {LONG}", ("--gpus",)),
    ],
)
def test_bad_input_is_one_line(arguments: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, "compare", *arguments.split()), *words)
