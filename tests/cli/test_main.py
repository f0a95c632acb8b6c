"""The program: exit status, what goes to stdout and what to stderr, and never a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import LONG, PROGRAM, check_refused, environment, here, program
from crossed import crossed

import memcalc
from memcalc.cli.help import SHORT
from memcalc.cli.main import COMMANDS
from memcalc.inputs.options import Options, option_name


def test_version() -> None:
    assert program("--version") == (0, f"memcalc {memcalc.__version__}\n", "")


def test_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "memcalc", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"memcalc {memcalc.__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_every_command(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, *arguments)
    assert ran.status == 0
    assert ran.stderr == ""
    for command in COMMANDS:
        assert command in ran.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, command, "--help")
    assert ran.status == 0
    assert ran.stderr == ""
    assert "Examples" in ran.stdout
    assert f"memcalc {command}" in ran.stdout


def test_help_has_what_everyone_needs_on_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short = here(capsys, "estimate", "--help").stdout
    monkeypatch.setenv("COLUMNS", "200")
    long = here(capsys, "estimate", "--help-all").stdout
    assert len(short.splitlines()) <= 56
    options = {option_name(field) for field in Options._fields}
    needed = {option_name(name) for name in SHORT if name in Options._fields}
    words = set(re.findall(r"--[a-z0-9-]+", long))
    assert options <= words
    assert set(re.findall(r"--[a-z0-9-]+", short)) & options == needed | {"--gpu"}
    assert long.index("Knobs of one engine") > max(long.index(panel) for panel in ("Batch and method", "Output"))


def test_json_is_one_document_and_nothing_else() -> None:
    ran = program("estimate", "--model", "llama-7b", "--gpus", "8", "--zero", "3", "--json")
    assert ran.status == 0
    assert ran.stderr == ""
    assert json.loads(ran.stdout)["schema_version"] == 1


def test_output_to_a_pipe_is_plain() -> None:
    ran = program("estimate", "--model", "llama-7b", "--gpu", "a100-40gb", TERM="xterm-256color")
    assert ran.status == 0
    assert ran.stderr == ""
    assert "\x1b" not in ran.stdout
    assert "does not fit NVIDIA A100" in ran.stdout


def test_what_does_not_fit_is_status_1_only_with_check() -> None:
    arguments = ("estimate", "--model", "llama-2-70b", "--gpu", "h100-80gb")
    assert program(*arguments).status == 0
    checked = program(*arguments, "--check")
    assert checked.status == 1
    assert checked.stderr == ""
    assert "does not fit" in checked.stdout
    assert program("estimate", "--model", "gpt2", "--gpu", "h100-80gb", "--check").status == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["estimate", "--model", "lama-7b"], ["--model", "lama-7b", "llama-7b"]),
        (["estimate", "--model", "gpt2", "--zero", "7"], ["--zero", "7", "0", "3"]),
        (["estimat"], ["estimat", "estimate"]),
        (["gpus", "h1000"], ["h1000", "h100"]),
    ],
)
def test_bad_input_is_status_2_and_one_line(arguments: list[str], words: list[str]) -> None:
    check_refused(program(*arguments), *words)


@pytest.mark.parametrize("name", ["estimates", "x\ny", "🦙", LONG, "\x1b[31mred", "ESTIMATE"])
def test_unknown_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, name), "unknown command", "estimate")


def test_the_empty_command_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, ""), "''", "unknown command")


@pytest.mark.parametrize("option", ["--nope", "--vers", "-z"])
def test_unknown_option_before_the_command(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, option), option)


# --- the world around the program


@pytest.mark.parametrize(
    ("encoding", "output"),
    crossed(["ascii", "cp1252", "utf-8:strict"], [[], ["--json"], ["--rows"], ["--format", "markdown"]]),
)
def test_any_encoding_of_stdout_will_do(encoding: str, output: list[str]) -> None:
    """A pipe on Windows is cp1252, which has neither the bars of the table nor the brackets of a formula."""
    ran = program("estimate", "--model", "gpt2", "--gpus", "8", "--zero", "1", *output, PYTHONIOENCODING=encoding)
    assert ran.stderr == ""
    assert ran.status == 0
    if output == ["--json"]:
        assert json.loads(ran.stdout)["model"]["name"] == "gpt2"


@pytest.mark.parametrize("output", [["--rows"], ["--json"], ["--format", "csv"]])
def test_a_reader_that_leaves_is_not_an_error(output: list[str]) -> None:
    """`memcalc ... | head`: no message, and not 1, which means that it does not fit."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [*PROGRAM, "estimate", "--model", "llama-7b", "--gpus", "8", "--zero", "3", *output],
            stdout=write, stderr=subprocess.PIPE, env=environment(), timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(write)
    assert done.stderr == b""
    assert done.returncode not in (1, 2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("output", [[], ["--json"]])
def test_a_full_disk_is_one_line(output: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, "estimate", "--model", "gpt2", *output],
            stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("memcalc: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("kind", ["table", "json", "csv", "markdown"])
def test_output_to_a_full_disk_is_one_line(kind: str) -> None:
    ran = program("estimate", "--model", "gpt2", "--format", kind, "--output", "/dev/full")
    check_refused(ran, "--output", "/dev/full", "cannot be written")
