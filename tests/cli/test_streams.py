"""The process's ends: stdout that is closed, full or left, stderr that is, and Ctrl-C at any moment. Real processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import PROGRAM, Ran, environment
from crossed import crossed

pytestmark = pytest.mark.skipif(os.name != "posix", reason="descriptors and signals of POSIX")

ESTIMATE = "estimate --model gpt2"
COMMANDS = (ESTIMATE, f"{ESTIMATE} --json", "models", "models gpt2 --json", "gpus", "gpus t4", "--help", "--version")


def shell(line: str) -> Ran:
    """Run a line of bash in which `memcalc` is the program. Its status is the program's, also in front of a pipe."""
    function = f'memcalc() {{ {shlex.join(PROGRAM)} "$@"; }}'
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {function}; {line}"],
        capture_output=True, env=environment(), timeout=60, check=False,
    )  # fmt: skip
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def check_line(ran: Ran, *words: str) -> None:
    assert ran.status == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("memcalc: ")
    assert ran.stderr.count("\n") == 1
    for word in words:
        assert word in ran.stderr


@pytest.mark.parametrize(("command", "place"), crossed(COMMANDS, [">&-", ">/dev/full"]))
def test_a_stdout_that_is_closed_or_full_is_one_line(command: str, place: str) -> None:
    check_line(shell(f"memcalc {command} {place}"), "stdout: cannot be written")


@pytest.mark.parametrize(
    "command", [f"{ESTIMATE} --rows", f"{ESTIMATE} --json", "models", "models gpt2", "gpus", "--help"]
)
def test_a_reader_that_leaves_is_no_error(command: str) -> None:
    ran = shell(f"memcalc {command} | head -1")
    assert (ran.status, ran.stderr) == (0, "")
    assert ran.stdout.count("\n") == 1


@pytest.mark.parametrize(("form", "fits"), crossed(["", "--json", "--rows"], [False, True]))
def test_a_reader_that_leaves_does_not_change_the_answer(form: str, fits: bool) -> None:
    gpu, status = ("80GB", 0) if fits else ("1GB", 1)
    ran = shell(f"memcalc {ESTIMATE} -s 64 --gpu {gpu} --check {form} | true")
    assert (ran.status, ran.stderr) == (status, "")


def test_a_closed_stdout_does_not_hide_an_error() -> None:
    check_line(shell("memcalc estimate --model gpt2 --zero 7 >&-"), "--zero 7")


def test_a_file_needs_no_stdout(tmp_path: Path) -> None:
    """And is not taken for it: the first file that is opened has the lowest number that is free."""
    path = tmp_path / "out"
    assert shell(f"memcalc {ESTIMATE} --json -o {path} <&- >&- 2>&-") == (0, "", "")
    assert path.read_text(encoding="utf-8") == shell(f"memcalc {ESTIMATE} --json").stdout


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full", "2>&- >&-", "2>/dev/full >/dev/full"])
def test_an_error_that_nobody_can_read_is_still_status_2(stderr: str) -> None:
    """And does not go to stdout in its place."""
    assert shell(f"memcalc {ESTIMATE} --zero 7 {stderr}") == (2, "", "")


def interruptible() -> None:
    """In a process that is being started: Ctrl-C ends it, even where the tests themselves run with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


INTERRUPTED_AT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from memcalc.__main__ import entry_point
sys.argv[1:] = {arguments!r}
entry_point()
"""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(
            (name, ["estimate", "--model", "llama-7b", "--gpu", "t4"])
            for name in (
                "memcalc.cli.main", "typer", "typer.main", "memcalc.cli.estimate", "memcalc.estimation.estimate",
                "memcalc.families.llama", "memcalc.engines.none", "memcalc.report.table", "memcalc.report.advice",
            )
        ),
        ("pydantic", ["estimate", "--model", "CONFIG"]),
        ("huggingface_hub", ["estimate", "--model", "owner/name"]),
        ("memcalc.report.models", ["models"]),
        ("memcalc.report.gpus", ["gpus"]),
        ("torch", ["validate", "--model", "gpt2"]),
    ],
)  # fmt: skip
def test_interrupted_in_an_import(name: str, arguments: list[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gpt2"}')
    given = [str(config) if argument == "CONFIG" else argument for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT.format(name=name, arguments=given)],
        capture_output=True, env=environment(), timeout=60, check=False, preexec_fn=interruptible,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"memcalc: interrupted\n")


@pytest.mark.parametrize("ignored", [False, True])
def test_interrupted_while_it_waits(ignored: bool, tmp_path: Path) -> None:
    """For a pipe. Where whoever started the process has SIGINT ignored, as bash does in the background, it stays so."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    trap = "trap '' INT; " if ignored else ""
    line = f"{trap}exec {shlex.join(PROGRAM)} models {pipe} --json"
    with subprocess.Popen(
        ["bash", "-c", line],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), preexec_fn=interruptible,
    ) as process:  # fmt: skip
        with pipe.open("wb") as file:  # once the program has opened it, too
            process.send_signal(2)
            if ignored:
                file.write(b'{"model_type": "gpt2"}')
            else:
                process.wait(60)
        out, error = process.communicate(timeout=60)
    assert error == (b"" if ignored else b"memcalc: interrupted\n")
    assert process.returncode == (0 if ignored else 130)
    assert bool(out) is ignored
