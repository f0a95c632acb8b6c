"""`memcalc plan`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command import LLAMA, PROGRAM, check_refused, environment, here, write_config

DOCS = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- plan of: (.+?) -->\n```text\n(.*?)```", re.DOTALL)
ASKED = ("--gpu", "rtx4090", "--gpus", "2", "--global-batch-size", "8", "-s", "128", "--jobs", "1")


@pytest.fixture
def small(tmp_path: Path) -> str:
    return write_config(tmp_path, LLAMA)


def test_the_plans_are_printed(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "plan", small, *ASKED)
    assert ran.status == 0
    assert ran.stderr == ""
    assert "1 is best:" in ran.stdout
    assert "Memory of a GPU against the time of a step" in ran.stdout
    assert re.search(r"[0-9,]+ layouts in .+: [0-9,]+ invalid", ran.stdout)


def test_the_document_has_the_names_of_the_contract(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(here(capsys, "plan", small, *ASKED, "--json", "--top", "2").stdout)
    assert document.keys() >= {"plans", "pareto", "layouts", "elapsed_seconds", "complete"}
    assert document["layouts"].keys() >= {"enumerated", "invalid", "too_large", "slower", "evaluated"}
    names = {"rank", "setup", "memory", "fit", "time", "gpu_hours", "cost", "why"}
    assert [one["rank"] for one in document["plans"]] == [1, 2]
    for one in document["plans"]:
        assert one.keys() >= names
        assert one["memory"].keys() == {"peak", "reserved", "device"}


def test_check_says_by_the_status_whether_there_is_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--gpus", "1", "--global-batch-size", "1", "--engine", "none", "--jobs", "1", "--check")
    ran = here(capsys, "plan", "llama-2-70b", "--gpu", "rtx4090", *asked)
    assert ran.status == 1
    assert "does not fit: the nearest layout needs" in ran.stdout
    assert here(capsys, "plan", "gpt2", "--gpu", "rtx4090", *asked).status == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--gpus", "2"), "--gpu"),
        (("--gpu", "rtx4090"), "--gpus"),
        (("--gpu", "rtx4090", "--gpus", "2"), "--global-batch-size"),
        ((*ASKED, "--days", "3"), "--tokens"),
        ((*ASKED, "--budget", "3"), "--price"),
        ((*ASKED, "--tp", "5"), "tp 5"),
        ((*ASKED, "--jobs", "none"), "--jobs"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, "plan", "gpt2", *arguments), word)


def test_a_plan_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, "plan", *ASKED), "--model")


def test_ctrl_c_prints_the_best_so_far() -> None:
    asked = ("--gpu", "h100-80gb", "--gpus", "64", "--global-batch-size", "256", "-s", "4096", "--jobs", "1", "--json")
    running = subprocess.Popen(
        [*PROGRAM, "plan", "llama-2-70b", *asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    time.sleep(4)
    os.kill(running.pid, signal.SIGINT)
    out, error = running.communicate(timeout=60)
    assert running.returncode == 0, error
    assert b"Traceback" not in error
    document = json.loads(out)
    assert not document["complete"] or document["plans"]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "docs/plan.md"])
def test_the_plans_of_the_pages_are_what_is_printed(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert blocks
    for arguments, shown in blocks:
        printed = _without_its_time(here(capsys, "plan", *arguments.split(), "--jobs", "1").stdout)
        for part in re.split(r"^ *…$", shown, flags=re.MULTILINE):
            assert _without_its_time(part) in printed


def _without_its_time(text: str) -> str:
    """Return the words of a printed plan without the time that the search took, whose length moves the ends of the lines."""
    return re.sub(r"layouts in .+?:", "layouts in …:", " ".join(text.split()))


def test_it_says_why_no_time_is_known(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    asked = ("plan", "gpt2", "--gpu", "t4", "--gpus", "2", "--global-batch-size", "8", "-s", "128", "--jobs", "1")
    assert "t4 has no known rate for bf16" in here(capsys, *asked).stdout
