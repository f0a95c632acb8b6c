"""The options that ask for pictures: what goes where, and what is refused."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from command import LLAMA, check_refused, here, program, write_config

SMALL = ("--gpus", "4", "--zero", "3")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return write_config(tmp_path, LLAMA)


def estimate(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return here(capsys, "estimate", *arguments)


def test_the_drawing_follows_the_table(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = estimate(capsys, model, *SMALL).stdout
    ran = estimate(capsys, model, *SMALL, "--timeline")
    assert (ran.status, ran.stderr) == (0, "")
    assert ran.stdout.startswith(table)
    assert "Timeline of a step" in ran.stdout.removeprefix(table)


def test_files_are_written_beside_the_table(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot, plain, packed = (tmp_path / name for name in ("a.pickle", "b.json", "c.json.gz"))
    table = estimate(capsys, model, *SMALL).stdout
    ran = estimate(capsys, model, *SMALL, "--snapshot", str(snapshot), "--trace", str(plain))
    assert (ran.status, ran.stdout) == (0, table)
    assert set(pickle.loads(snapshot.read_bytes())) == {"segments", "device_traces"}
    assert json.loads(plain.read_text(encoding="utf-8"))["traceEvents"]
    assert estimate(capsys, model, *SMALL, "--trace", str(packed)).status == 0
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()


def test_json_is_alone_on_stdout(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = estimate(capsys, model, "--json").stdout
    ran = estimate(capsys, model, "--json", "--timeline", "--trace", str(tmp_path / "t.json"))
    assert (ran.status, ran.stdout) == (0, alone)
    assert "Timeline of a step" in ran.stderr
    assert (tmp_path / "t.json").exists()


def test_with_a_file_for_the_report_the_drawing_is_on_stdout(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = estimate(capsys, model, "--timeline", "-o", str(tmp_path / "report.json"))
    assert ran.stdout.lstrip().startswith("Timeline of a step")
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))


def test_what_is_folded_is_said(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (model, "--global-batch-size", "9")
    ran = estimate(capsys, *arguments, "--snapshot", str(tmp_path / "s"))
    assert ran.stderr == "memcalc: 3 of 9 micro-batches are shown; the others repeat what these do\n"
    drawn = estimate(capsys, *arguments, "--timeline")
    assert "3 of 9 micro-batches are shown" in drawn.stdout
    assert drawn.stderr == ""


@pytest.mark.parametrize("option", ["--snapshot", "--trace"])
def test_a_file_that_cannot_be_written(
    option: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(estimate(capsys, model, option, str(tmp_path / "no" / "x")), option, "cannot be written")
    check_refused(estimate(capsys, model, option, str(tmp_path)), option, "cannot be written")
    check_refused(estimate(capsys, model, option, "a\0b"), option, "cannot be written")
    for name in ("", "-"):
        check_refused(estimate(capsys, model, option, name), option, "the name of a file")


def test_two_outputs_in_one_file(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    same = "a.json"
    check_refused(estimate(capsys, model, "--snapshot", same, "--trace", f"./{same}"), "--trace", "--snapshot writes")
    check_refused(estimate(capsys, model, "-o", same, "--trace", str(tmp_path / same)), "--trace", "--output writes")
    assert not (tmp_path / same).exists()
    assert estimate(capsys, model, "--snapshot", "/dev/null", "--trace", "/dev/null").status == 0


@pytest.mark.parametrize("picture", [("--timeline",), ("--snapshot", "x"), ("--trace", "x")])
def test_a_bare_size_has_no_step(picture: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(estimate(capsys, "--params", "7B", *picture), picture[0], "--model", "--params")


def test_an_order_that_is_not_known(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    stages = ("--engine", "deepspeed", "--gpus", "4", "--pp", "2", "--global-batch-size", "8")
    check_refused(estimate(capsys, "llama-7b", *stages, "--timeline"), "--engine deepspeed", "--pp 2", "not known")


def test_a_pipe_gets_no_colour_and_an_ascii_one_no_blocks(model: str) -> None:
    plain = program("estimate", model, "--timeline", TERM="xterm-256color")
    assert "\x1b" not in plain.stdout
    coloured = program(
        "estimate", model, "--timeline", FORCE_COLOR="1", TERM="xterm-256color", PYTHONIOENCODING="utf-8"
    )
    assert "█" in coloured.stdout
    narrow = program("estimate", "gpt2", "--timeline", COLUMNS="60", PYTHONIOENCODING="utf-8")
    drawing = narrow.stdout.split("Timeline of a step")[1]
    assert max(len(line) for line in drawing.splitlines()) <= 60


def test_without_a_picture_no_picture_is_imported() -> None:
    code = (
        "import sys; from memcalc.cli.main import main; main(['estimate', 'gpt2', '--json']);"
        "assert not [name for name in sys.modules if name.startswith('memcalc.pictures')], 'imported'"
    )
    import subprocess
    import sys as system

    from command import environment

    done = subprocess.run(
        [system.executable, "-c", code], capture_output=True, env=environment(), timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
